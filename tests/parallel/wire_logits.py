"""Logits of the tiny checkpoint on eight devices by the wire to the experts: run by test_wire.py in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch

from torchqwen_tpu import AutoModelForCausalLM, ParallelConfig, RuntimeConfig


def main(folder: str, tokens: str, output: str) -> None:
    """Tokens [rows, columns] as a file of torch.save in, logits by the name of the wire out."""
    ids, logits = torch.load(tokens), {}
    for wire in ("bfloat16", "float8_e4m3fn", "int8"):
        parallel, runtime = ParallelConfig(chips=4, cores=2), RuntimeConfig(moe_wire=wire)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", parallel=parallel, runtime=runtime)
        logits[wire] = model(ids).logits.cpu()
    torch.save(logits, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
