"""How long a task of lm-eval takes here and with lm-eval's own transformers model, one after the other in one process.

    python -m torchqwen_tpu.evaluation.benchmark --model M --tasks T [--include-path D] [--limit N] [--batch-size 8]

Both run in float32 on the same requests, with the same work of lm-eval's own around them: building requests, gathering
results. So each time comes twice, of the whole evaluation and of the part inside the model: tokenizing and scoring. (Reading
lm-eval's task files is in neither.) Ours runs twice: its first run compiles.
"""

from __future__ import annotations

import argparse
import functools
import time
from contextlib import AbstractContextManager

from torchqwen_tpu.commands.arguments import load_model, load_tokenizer, model_arguments, positive
from torchqwen_tpu.evaluation.tasks import find_tasks

PEER = "lm-eval's hf"
METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
"""What lm-eval asks of a model."""


class Stopwatch(AbstractContextManager):
    """Seconds by the clock and of processor time, summed over all `with` blocks."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error) -> None:
        wall, cpu = self._started
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    def __str__(self) -> str:
        return f"{self.wall:.1f} s ({self.cpu:.1f} s of processor time)"


def measure(model, method: str, stopwatch: Stopwatch) -> None:
    """Let every call of a model's method run under a stopwatch."""
    function = getattr(type(model), method)

    @functools.wraps(function)
    def measured(*arguments, **options):
        with stopwatch:
            return function(model, *arguments, **options)

    setattr(model, method, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[model_arguments("float32")])
    parser.add_argument("--tasks", required=True, type=lambda text: text.split(","), metavar="T,T")
    parser.add_argument("--include-path", metavar="D", help="folder of further task files")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="of lm-eval's model (default: 8)")
    parser.add_argument("--max-length", type=positive, default=2048, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    manager = find_tasks(arguments.tasks, arguments.include_path)

    import lm_eval
    from lm_eval.models.huggingface import HFLM

    from torchqwen_tpu.evaluation.lm_eval_model import TorchQwenLM

    tokenizer = load_tokenizer(arguments)
    ours = TorchQwenLM(load_model(arguments), tokenizer, max_length=arguments.max_length)
    theirs = HFLM(
        arguments.model, tokenizer=tokenizer, dtype="float32", device="cpu",
        batch_size=arguments.batch_size, max_length=arguments.max_length,
    )  # fmt: skip
    times = {}
    for name, model in (("torchqwen, first run", ours), ("torchqwen", ours), (PEER, theirs)):
        whole, inside = times[name] = Stopwatch(), Stopwatch()
        for method in METHODS:
            measure(model, method, inside)
        with whole:
            # No error bars: their resampling would be measured as well.
            results = lm_eval.simple_evaluate(
                model, tasks=arguments.tasks, task_manager=manager, limit=arguments.limit, bootstrap_iters=0, log_samples=False
            )
        figures = ", ".join(
            f"{metric.removesuffix(',none')} {value:.4f}"
            for task in results["results"].values()
            for metric, value in task.items()
            if metric.endswith(",none") and isinstance(value, float)
        )
        print(f"{name}: {whole}, in the model {inside}; {figures}", flush=True)
    for name in ("torchqwen", "torchqwen, first run"):
        (whole, inside), (their_whole, their_inside) = times[name], times[PEER]
        print(
            f"{name}: {their_whole.wall / whole.wall:.1f} times as fast, in the model {their_inside.wall / inside.wall:.1f}; "
            f"by processor time {their_whole.cpu / whole.cpu:.1f} and {their_inside.cpu / inside.cpu:.1f}"
        )


if __name__ == "__main__":
    main()
