"""`torchqwen-tpu chat`: talk to a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from transformers import TextStreamer

from torchqwen_tpu.chat import Conversation
from torchqwen_tpu.commands.arguments import decoding_arguments, decoding_options, load_model, load_tokenizer, model_arguments


def add(commands) -> None:
    parser = commands.add_parser(
        "chat", parents=[model_arguments("auto"), decoding_arguments()], help="talk to a model, a line a turn, up to /exit"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments)
    conversation = Conversation(load_model(arguments), tokenizer, arguments.seed, **decoding_options(arguments))
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    for line in _lines():
        conversation.say(line, streamer)


def _lines() -> Iterator[str]:
    """Lines of stdin up to its end or /exit, empty ones left out."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line
