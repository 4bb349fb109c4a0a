"""An FP8 checkpoint on eight devices, under every policy: logits, and what each device holds; run in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch
import torch_xla.distributed.spmd as spmd
from support import padded, random_rows

from torchqwen_tpu import AutoModelForCausalLM, ParallelConfig, RuntimeConfig
from torchqwen_tpu.config import QUANTIZATIONS

ROWS = random_rows((9, 4), seed=7)


def main() -> None:
    folder, output = sys.argv[1:]
    result = {}
    for policy in QUANTIZATIONS:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", parallel=ParallelConfig(4, 2, "dp_tp"), runtime=RuntimeConfig(quantization=policy)
        )
        shards = {
            name: [tuple(shard.data.shape) for shard in spmd.XLAShardedTensor(value).local_shards]
            for name, value in model.named_parameters()
        }
        tokens = model.generate(**padded(ROWS), max_new_tokens=16, do_sample=True, temperature=100.0, top_k=0, seed=3)
        result[policy] = {"logits": model(**padded(ROWS)).logits.cpu(), "shards": shards, "tokens": tokens}
    torch.save(result, output)


if __name__ == "__main__":
    main()
