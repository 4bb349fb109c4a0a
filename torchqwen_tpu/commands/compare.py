"""`torchqwen-tpu compare`: one text under two configurations."""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchqwen_tpu.commands.arguments import load_tokenizer, model_arguments, positive
from torchqwen_tpu.config import ParallelConfig
from torchqwen_tpu.monitoring.compare import compare, comparison_page, format_comparison
from torchqwen_tpu.monitoring.sides import build_sides, parse_settings


def add(commands) -> None:
    parser = commands.add_parser(
        "compare", parents=[model_arguments("float32", prepares=False)], help="one text under two configurations",
        description="Gives two configurations the same tokens and reports how far the layers' outputs (relative RMSE) and the "
        "next-token distributions (KL, in nats) come apart by position. Settings are name=value, with commas between them: "
        "fields of RuntimeConfig, dtype, model (another checkpoint), implementation=transformers.",
    )  # fmt: skip
    parser.add_argument("--a", required=True, metavar="S", help='settings, for example "state_dtype=float32"; "": defaults')
    parser.add_argument("--b", required=True, metavar="S", help='settings, for example "state_dtype=bfloat16"')
    parser.add_argument("--length", type=positive, default=4096, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument(
        "--chunk", type=positive, default=512, metavar="N",
        help="tokens a step; states are stored, and so rounded, once a step: 1 is as in decoding (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--input", metavar="F", help="text file (default: the source of Python's standard library)")
    parser.add_argument("--json", metavar="F", help="also write the figures to this file")
    parser.add_argument("--report", metavar="F", help="also write an HTML page with plots to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    settings = parse_settings(arguments.a), parse_settings(arguments.b)
    tokens = _tokens(arguments, load_tokenizer(arguments))
    parallel = ParallelConfig(arguments.chips, arguments.cores, arguments.parallel)
    sides = build_sides(settings, arguments.model, arguments.dtype, parallel, arguments.length)
    result = compare(sides, tokens, arguments.chunk, (arguments.a, arguments.b))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result.summary(), indent=1) + "\n", encoding="utf-8")
    if arguments.report:
        Path(arguments.report).write_text(comparison_page(result), encoding="utf-8")
    print(format_comparison(result))


def _tokens(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The first `length` tokens of the input."""
    tokens: list[int] = []
    for text in _texts(arguments.input):
        tokens += tokenizer(text).input_ids
        if len(tokens) >= arguments.length:
            return np.array(tokens[: arguments.length])
    name = arguments.input or "the standard library's source"
    raise ValueError(f"{name} has {len(tokens)} tokens, fewer than --length {arguments.length}; pass a longer text or lower it")


def _texts(path: str | None) -> Iterator[str]:
    if path is not None:
        yield Path(path).read_text(encoding="utf-8")
        return
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield module.read_text(encoding="utf-8")
