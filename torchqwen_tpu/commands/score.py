"""`torchqwen-tpu score`: scores of given texts, token by token."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchqwen_tpu.commands.arguments import count, load_model, load_tokenizer, model_arguments, positive_or_auto
from torchqwen_tpu.evaluation.files import FORMS, check_output, read_requests, write_scores
from torchqwen_tpu.evaluation.scoring import score_requests


def add(commands) -> None:
    parser = commands.add_parser(
        "score", parents=[model_arguments("auto")], help="score texts token by token",
        description="Log-probability, rank and entropy of every token of the lines of a JSONL file, as one text at a time "
        "gives them. Of a text all tokens but the first are scored, of a continuation all.",
    )  # fmt: skip
    parser.add_argument("--input", required=True, type=Path, metavar="F", help=f"JSONL; a line is {FORMS}")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="F", help="file to write: .jsonl, .parquet or .npz by its ending"
    )
    parser.add_argument("--top-k", type=count, default=0, metavar="K", help="also the K most likely tokens at each place")
    parser.add_argument("--routers", action="store_true", help="also the experts of every layer and their weights")
    parser.add_argument(
        "--batch-size", type=positive_or_auto, default="auto", metavar="N", help="sequences at once, a core that owns requests"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    check_output(arguments.output)
    tokenizer = load_tokenizer(arguments)
    requests, lines = read_requests(arguments.input, tokenizer)
    batch_size = None if arguments.batch_size == "auto" else arguments.batch_size
    model = load_model(arguments)
    scores = score_requests(model, requests, top_k=arguments.top_k, routers=arguments.routers, batch_size=batch_size)
    write_scores(arguments.output, scores, lines)
    total = sum(len(scored.token_ids) for scored in scores)
    nats = sum(scored.logprob.sum(dtype="float64") for scored in scores)
    print(f"{len(scores)} texts, {total} tokens, {-nats / max(total, 1):.4f} nats a token: {arguments.output}")
