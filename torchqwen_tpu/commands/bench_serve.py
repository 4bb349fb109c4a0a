"""`torchqwen-tpu bench serve`: an engine under load."""

from __future__ import annotations

import argparse
import json

from torchqwen_tpu.benchmark import PEERS
from torchqwen_tpu.checkpoint.resolve import load_config, resolve_folder
from torchqwen_tpu.commands.arguments import load_model, model_arguments, positive
from torchqwen_tpu.serving_benchmark import Load, format_serving, measure_serving


def add(commands) -> None:
    parser = commands.add_parser(
        "serve", parents=[model_arguments("float32")], help="measure the engine under load",
        description="Requests of random tokens run on the engine, so many at a time. Prints tokens a second, time to the first "
        "token and per output token, a step's time on host and device, and how full pages and slots are.",
    )  # fmt: skip
    parser.add_argument("--input-len", type=positive, default=512, metavar="N", help="of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=positive, default=64, metavar="N", help="new tokens (default: %(default)s)")
    parser.add_argument("--concurrency", type=positive, default=64, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument("--requests", type=positive, metavar="N", help="in all (default: twice the concurrency)")
    parser.add_argument("--mixed", action="store_true", help="draw lengths evenly from 1 to the given ones")
    parser.add_argument("--against", choices=PEERS, help="another library, in padded batches, to measure beside this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    folder = resolve_folder(arguments.model)
    load_config(folder)
    requests = arguments.requests or 2 * arguments.concurrency
    load = Load(arguments.input_len, arguments.output_len, arguments.concurrency, requests, arguments.mixed)
    report = measure_serving(load_model(arguments), folder, load, arguments.against)
    print(json.dumps(report) if arguments.json else format_serving(report))
