"""`torchqwen-tpu bench host`: what a decode call costs the host."""

from __future__ import annotations

import argparse
import dataclasses
import json

from torchqwen_tpu.commands.arguments import positive
from torchqwen_tpu.host_benchmark import format_host_time, measure_host

FORMS = {"scanned": True, "unrolled": False}


def add(commands) -> None:
    parser = commands.add_parser(
        "host", help="measure what a decode call costs the host",
        description="Decode calls of a random model with as many layers as asked for, all small. Prints the arguments of the "
        "graph, the time of the first call (which traces and compiles), of a call, and of the host in it: a call with the same "
        "arguments and results whose graph has next to nothing to compute.",
    )  # fmt: skip
    parser.add_argument("--layers", type=positive, default=60, metavar="N", help="default: %(default)s")
    parser.add_argument("--sequences", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--forms", choices=(*FORMS, "both"), default="scanned", help="of the layers (default: %(default)s)")
    parser.add_argument("--calls", type=positive, default=30, metavar="N", help="measured (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    forms = FORMS if arguments.forms == "both" else (arguments.forms,)
    times = {
        form: measure_host(arguments.layers, arguments.sequences, FORMS[form], arguments.calls) for form in forms
    }
    if arguments.json:
        print(json.dumps({form: dataclasses.asdict(time) for form, time in times.items()}))
    else:
        print(format_host_time(times))
