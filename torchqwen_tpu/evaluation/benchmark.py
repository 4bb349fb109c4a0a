"""How long a task of lm-eval takes here and with lm-eval's own transformers model, one after the other in one process.

    python -m torchqwen_tpu.evaluation.benchmark --model M --tasks T [--include-path D] [--limit N] [--batch-size 8]

Both run in float32 on the same requests. Ours runs twice: its first run compiles.
"""

from __future__ import annotations

import argparse
import time

from torchqwen_tpu.commands.arguments import load_model, load_tokenizer, model_arguments, positive
from torchqwen_tpu.evaluation.tasks import check_tasks, run_tasks

PEER = "lm-eval's hf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[model_arguments("float32")])
    parser.add_argument("--tasks", required=True, type=lambda text: text.split(","), metavar="T,T")
    parser.add_argument("--include-path", metavar="D", help="folder of further task files")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="of lm-eval's model (default: 8)")
    parser.add_argument("--max-length", type=positive, default=2048, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    check_tasks(arguments.tasks, arguments.include_path)

    from lm_eval.models.huggingface import HFLM

    from torchqwen_tpu.evaluation.lm_eval_model import TorchQwenLM

    tokenizer = load_tokenizer(arguments)
    ours = TorchQwenLM(load_model(arguments), tokenizer, max_length=arguments.max_length)
    theirs = HFLM(
        arguments.model, tokenizer=tokenizer, dtype="float32", device="cpu",
        batch_size=arguments.batch_size, max_length=arguments.max_length,
    )  # fmt: skip
    seconds = {}
    for name, model in (("torchqwen, first run", ours), ("torchqwen", ours), (PEER, theirs)):
        started, started_cpu = time.perf_counter(), time.process_time()
        # No error bars: their resampling would be measured as well.
        results = run_tasks(
            model, arguments.tasks, include_path=arguments.include_path, limit=arguments.limit, bootstrap_iters=0
        )
        seconds[name] = time.perf_counter() - started
        figures = ", ".join(
            f"{metric.removesuffix(',none')} {value:.4f}"
            for task in results["results"].values()
            for metric, value in task.items()
            if metric.endswith(",none") and isinstance(value, float)
        )
        print(f"{name}: {seconds[name]:.1f} s, {time.process_time() - started_cpu:.1f} s of CPU; {figures}", flush=True)
    for name in ("torchqwen", "torchqwen, first run"):
        print(f"{name}: {seconds[PEER] / seconds[name]:.1f} times as fast")


if __name__ == "__main__":
    main()
