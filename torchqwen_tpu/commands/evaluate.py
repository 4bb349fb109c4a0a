"""`torchqwen-tpu evaluate`: lm-eval's tasks on a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchqwen_tpu.commands.arguments import count, load_model, load_tokenizer, model_arguments, positive, positive_or_auto
from torchqwen_tpu.evaluation.tasks import evaluate, find_tasks, format_results, write_results


def add(commands) -> None:
    parser = commands.add_parser(
        "evaluate", parents=[model_arguments("auto")], help="run tasks of lm-eval",
        description="Runs tasks of lm-eval and prints its table. With --dtype float32 every score is what one request at a "
        "time gives in float32.",
    )  # fmt: skip
    parser.add_argument("--tasks", required=True, type=lambda text: text.split(","), metavar="T,T", help="names of tasks")
    parser.add_argument("--include-path", metavar="D", help="folder of further task files")
    parser.add_argument("--num-fewshot", type=count, metavar="N", help="examples in the prompt (default: the task's)")
    parser.add_argument(
        "--batch-size", type=positive_or_auto, default="auto", metavar="N", help="sequences at once, a core that owns requests"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="take only the first N documents of each task")
    parser.add_argument("--max-length", type=positive, metavar="N", help="longest input (default: the model's limit)")
    parser.add_argument("--output", metavar="F", help="also write everything to this JSON file")
    parser.add_argument("--log-samples", action="store_true", help="with --output: every document's result too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments)
    manager = find_tasks(arguments.tasks, arguments.include_path)
    results = evaluate(
        load_model(arguments), tokenizer, arguments.tasks,
        task_manager=manager, num_fewshot=arguments.num_fewshot, batch_size=arguments.batch_size,
        limit=arguments.limit, max_length=arguments.max_length, log_samples=arguments.log_samples,
    )  # fmt: skip
    if arguments.output:
        write_results(results, Path(arguments.output))
    print(format_results(results))
