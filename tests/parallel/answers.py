"""What a model answers under one layout, into a file: run in a process of its own, whose number of devices is fixed."""

from __future__ import annotations

import argparse
import json
import sys
import unittest.mock
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import numpy as np
import torch
from support import padded, random_rows

import torchqwen_tpu
from torchqwen_tpu import AutoModelForCausalLM, ParallelConfig, RuntimeConfig
from torchqwen_tpu.evaluation import score_requests, scoring
from torchqwen_tpu.runtime.graph import compilations

NEW_TOKENS = 32
ROWS = random_rows((4, 17, 1), seed=40)
"""A batch that no mesh of more than one device divides."""

REQUESTS = [(context, after) for context in ROWS for after in random_rows((1, 6, 3), seed=42)]
"""Continuations to be scored: fewer contexts than devices, and three for each of them."""


def sampled(model) -> torch.Tensor:
    return model.generate(**padded(ROWS, "left"), max_new_tokens=NEW_TOKENS, do_sample=True, seed=[1, 2, 3])


def answers(model) -> dict[str, torch.Tensor]:
    """Logits, greedy tokens, beams and samples; every sequence fits one bucket of 64 tokens."""
    batch = padded(ROWS, "left")
    result = {
        "logits": model(**batch).logits,
        "alone": model(torch.tensor(ROWS[1:2])).logits,
        "greedy": model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False),
        "greedy alone": model.generate(torch.tensor(ROWS[1:2]), max_new_tokens=NEW_TOKENS, do_sample=False),
        "beams": model.generate(torch.tensor(ROWS[1:2]), max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=3),
        "sampled": sampled(model),
    }
    with unittest.mock.patch.object(scoring, "STEP_TOKENS", (64, 128)):
        result["scores"] = torch.from_numpy(np.concatenate([one.logprob for one in score_requests(model, REQUESTS)]))
    first = model.generate(**batch, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    more = padded(random_rows((2, 3, 5), seed=41), "left")
    ids = torch.cat([first.sequences, more["input_ids"]], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 4, dtype=torch.long), more["attention_mask"]], dim=1)
    result["turn"] = model.generate(ids, attention_mask=mask, cache=first.cache, max_new_tokens=8, do_sample=False)
    result["turn mask"] = mask
    before = compilations()
    model.generate(**padded(ROWS[::2], "left"), max_new_tokens=9, do_sample=False)
    model.generate(**padded(ROWS, "left"), max_new_tokens=20, do_sample=True, seed=4, top_p=0.9)
    model.generate(torch.tensor(ROWS[:1]), max_new_tokens=12, do_sample=False, num_beams=3)
    result["compilations"] = torch.tensor(compilations() - before)
    return {name: value.cpu() for name, value in result.items()}


def parity(model, prompts: list[list[int]], greedy: list[list[int]], new_tokens: int) -> dict[str, torch.Tensor]:
    """Logits of one batch, greedy tokens of another."""
    return {
        "logits": model(**padded(prompts, "left")).logits.cpu(),
        "greedy": model.generate(
            **padded(greedy, "left"), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        ),
    }


def refusals(folder: str, config: ParallelConfig) -> dict[str, str]:
    """What a second mesh of another size, in the same process, is refused with."""
    other = ParallelConfig(chips=config.chips + 1, cores=config.cores)
    try:
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32", parallel=other)
    except Exception as error:
        return {type(error).__name__: str(error)}
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("output")
    parser.add_argument("--chips", type=int)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--layout")
    parser.add_argument("--scan-layers", action="store_true")
    parser.add_argument("--parity", help="arguments of parity() as JSON, in place of all answers")
    options = parser.parse_args()
    config = ParallelConfig(chips=options.chips, cores=options.cores, layout=options.layout)
    try:
        model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(
            options.folder, dtype="float32", parallel=config, runtime=RuntimeConfig(scan_layers=options.scan_layers)
        )
    except ValueError as error:
        torch.save({"refused": str(error)}, options.output)
        return
    if options.parity:
        torch.save(parity(model, **json.loads(options.parity)), options.output)
    else:
        torch.save({**answers(model), "other mesh": refusals(options.folder, config)}, options.output)


if __name__ == "__main__":
    main()
