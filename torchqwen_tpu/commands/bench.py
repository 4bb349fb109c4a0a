"""`torchqwen-tpu bench`: greedy generation and prefill, measured beside another library; `bench serve` and `bench host` are in
`bench_serve` and `bench_host`."""

from __future__ import annotations

import argparse
import json

from torchqwen_tpu.benchmark import PEERS, Sizes, format_table, measure
from torchqwen_tpu.checkpoint.resolve import load_config, resolve_folder
from torchqwen_tpu.commands import bench_host, bench_serve
from torchqwen_tpu.commands.arguments import count, load_model, model_arguments, positive, positive_list


def add(commands) -> None:
    parser = commands.add_parser(
        "bench", parents=[model_arguments("float32", required=False)], help="measure greedy generation and prefill",
        description="Greedy generation of random prompts with stop tokens off, and prefill of one prompt. After a "
        "warm-up that compiles, both libraries are measured in turn; each figure is the median.",
    )  # fmt: skip
    parser.add_argument("--batch", type=positive_list, default="1,8,64", metavar="B,B", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=positive, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefill-tokens", type=count, default=4096, metavar="N", help="default: %(default)s; 0: none")
    parser.add_argument("--against", choices=PEERS, help="another library to measure beside this one")
    parser.add_argument("--pairs", type=positive, default=5, metavar="N", help="measurements (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    # Not required: `bench serve` brings its own --model, `bench host` none.
    parser.set_defaults(missing_model=lambda: parser.error("the following arguments are required: --model"))
    others = parser.add_subparsers(metavar="serve | host", help="measure the engine under load, or the host's part of a call")
    bench_serve.add(others)
    bench_host.add(others)


def run(arguments: argparse.Namespace) -> None:
    if arguments.model is None:
        arguments.missing_model()
    folder = resolve_folder(arguments.model)
    load_config(folder)
    sizes = Sizes(tuple(arguments.batch), arguments.prompt_tokens, arguments.new_tokens, arguments.prefill_tokens)
    report = measure(load_model(arguments), folder, arguments.against, sizes, arguments.pairs)
    print(json.dumps(report) if arguments.json else format_table(report))
