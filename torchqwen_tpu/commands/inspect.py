"""`torchqwen-tpu inspect`: what a checkpoint holds, and whether it would load."""

from __future__ import annotations

import argparse
import json

import torch

from torchqwen_tpu.auto import class_of
from torchqwen_tpu.checkpoint.prepared import is_prepared
from torchqwen_tpu.checkpoint.resolve import check_quantization, load_config, resolve_folder
from torchqwen_tpu.checkpoint.summary import Summary, summarize
from torchqwen_tpu.commands.arguments import positive
from torchqwen_tpu.config import LAYOUTS, QUANTIZATIONS
from torchqwen_tpu.parallel.mesh import DeviceMesh

WOULD_NOT_LOAD = 1
LISTED = 20
"""Problems of a kind that the text lists; JSON has them all."""


def add(commands) -> None:
    parser = commands.add_parser(
        "inspect", help="what a checkpoint holds, and whether it would load",
        description="Reads the headers and the scales of a checkpoint, starts no device, and says what each device of a mesh "
        "would hold. Exit status 1 if the checkpoint would not load.",
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder, or an id on the hub")
    parser.add_argument("--chips", type=positive, default=4, metavar="N", help="chips of the mesh (default: %(default)s)")
    parser.add_argument("--cores", type=positive, default=2, metavar="N", help="cores a chip (default: %(default)s)")
    parser.add_argument("--parallel", default="dp", choices=LAYOUTS, help="layout over the devices (default: %(default)s)")
    parser.add_argument(
        "--quantization", default="channel", choices=QUANTIZATIONS,
        help="what becomes of FP8 weights (default: %(default)s, as on a TPU)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"),
        help="of other weights (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder = resolve_folder(arguments.checkpoint)
    if is_prepared(folder):
        raise ValueError(f"{folder} is a prepared checkpoint; inspect the published one that it was made of")
    config = load_config(folder)
    check_quantization(config, folder)
    mesh = DeviceMesh(arguments.chips, arguments.cores, arguments.parallel)
    dtype = getattr(torch, arguments.dtype)
    summary = summarize(folder, config, class_of(config).without_weights, mesh, dtype, arguments.quantization)
    print(json.dumps(summary.as_dict(), indent=2) if arguments.json else format_summary(summary))
    return 0 if summary.loads else WOULD_NOT_LOAD


def format_summary(summary: Summary) -> str:
    total = sum(size.bytes for size in summary.sizes)
    lines = [f"{summary.folder}: {summary.model_type}, {total:,} bytes of tensors in {summary.files} files", ""]
    lines += [f"{'part':<24}{'dtype':<9}{'tensors':>8}{'parameters':>18}{'bytes':>18}"]
    lines += [
        f"{size.part:<24}{size.dtype:<9}{size.tensors:>8,}{size.parameters:>18,}{size.bytes:>18,}" for size in summary.sizes
    ]
    lines += ["", f"stop tokens: {', '.join(map(str, summary.eos_token_ids)) or 'none'}"]
    lines += [f"chat template: {'yes' if summary.chat_template else 'no'}"]
    if summary.device_bytes:
        by_type = ", ".join(f"{dtype} {count:,}" for dtype, count in sorted(summary.device_bytes.items()))
        lines += [
            f"weights a device of mesh {summary.mesh}, FP8 weights by policy '{summary.quantization}': "
            f"{sum(summary.device_bytes.values()):,} bytes ({by_type})"
        ]
    for kind in ("damaged", "missing", "unexpected", "mismatched"):
        problems = getattr(summary, kind)
        lines += [f"{kind}: {problem}" for problem in problems[:LISTED]]
        if len(problems) > LISTED:
            lines.append(f"{kind}: {len(problems) - LISTED} more")
    return "\n".join([*lines, "would load" if summary.loads else "would NOT load"])
