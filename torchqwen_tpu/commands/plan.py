"""`torchqwen-tpu plan`: will a model fit a TPU, and how fast would it be."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path

from custom_ops.tpu_compiler import TpuCompilerMissing
from torchqwen_tpu.commands.arguments import positive
from torchqwen_tpu.planning.html import write_report
from torchqwen_tpu.planning.planner import plan
from torchqwen_tpu.planning.report import format_plan
from torchqwen_tpu.planning.request import DTYPES, KV_DTYPES, PlanRequest

DOES_NOT_FIT = 2


def add(commands) -> None:
    parser = commands.add_parser(
        "plan", help="will a model fit a TPU, and how fast would it be: the TPU compiler's answer, without a TPU",
        description="Traces the model's steps from its config.json, compiles them with the TPU compiler (libtpu, no TPU "
        "needed) and models their times. Takes minutes. Exit status 2 where it does not fit.",
    )  # fmt: skip
    add_request(parser)
    parser.add_argument("--json", metavar="F", help="also write everything to this JSON file")
    parser.add_argument("--report", metavar="F", help="also write a report in HTML to this file")
    parser.set_defaults(run=run)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Arguments that `request_of` makes a `PlanRequest` of."""
    default = {field.name: field.default for field in dataclasses.fields(PlanRequest)}
    parser.add_argument("--model", required=True, metavar="M", help="folder with a config.json, that file, or an id on the hub")
    parser.add_argument(
        "--topology", default=default["topology"], metavar="T", help="e.g. tpu7x:2x2x1, v6e:2x4 (default: %(default)s)"
    )
    for name, what in (
        ("concurrency", "sequences at once"), ("input-len", "tokens of a prompt"), ("output-len", "tokens generated"),
        ("page-size", "tokens a KV page"), ("prefill-chunk", "most tokens a rank takes in one step"),
    ):  # fmt: skip
        value = default[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=positive, default=value, metavar="N", help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--parallel", default="dp", metavar="L",
        help="layout: dp, dp_tp, tp, or with its sizes, dp8, dp4tp2, tp8; auto compares all (default: %(default)s)",
    )
    parser.add_argument("--dtype", default=default["dtype"], choices=DTYPES, help="of the weights (default: %(default)s)")
    parser.add_argument(
        "--state-dtype", default=default["state_dtype"], choices=("bfloat16", "float32"),
        help="of the recurrent states (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtype", default=default["kv_dtype"], choices=KV_DTYPES, help="of the KV pages (default: %(default)s)"
    )


def request_of(arguments: argparse.Namespace) -> PlanRequest:
    names = {field.name for field in dataclasses.fields(PlanRequest)} - {"layout", "watched"}
    return PlanRequest(**{name: getattr(arguments, name) for name in names}, layout=arguments.parallel)


def run(arguments: argparse.Namespace) -> int:
    request = request_of(arguments)
    for file in (arguments.json, arguments.report):
        if file and not Path(file).resolve().parent.is_dir():
            raise ValueError(f"there is no folder to write {file} into")
    # Compiling leaves a folder and a process behind where this one dies at once.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answer = plan(request, lambda what: print(what, file=sys.stderr, flush=True))
    except TpuCompilerMissing as error:
        raise ValueError(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    print(format_plan(answer))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(answer.to_dict(), indent=1))
    if arguments.report:
        write_report(answer, Path(arguments.report))
    return 0 if answer.fits else DOES_NOT_FIT
