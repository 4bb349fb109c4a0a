"""A watched forward and generation on a mesh: run in a process of its own, whose number of devices is fixed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support import padded, random_rows

from torchqwen_tpu import AutoModelForCausalLM, ParallelConfig, monitoring

ROWS = random_rows((70, 30, 90), seed=60)


def generate(model, rows=ROWS):
    """20 tokens for rows of these lengths: all tests share the steps that this compiles."""
    return model.generate(**padded(rows), max_new_tokens=20, do_sample=False)


def main() -> None:
    folder, stream, chips, cores, layout = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", parallel=ParallelConfig(int(chips), int(cores), layout)
    )
    with monitoring.watch(model, stream=stream, report=f"{stream}.html"):
        generate(model)


if __name__ == "__main__":
    main()
