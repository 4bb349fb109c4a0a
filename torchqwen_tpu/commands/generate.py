"""`torchqwen-tpu generate`: continue a prompt."""

from __future__ import annotations

import argparse
import json
import time

from torchqwen_tpu.commands.arguments import decoding_arguments, decoding_options, load_model, load_tokenizer, model_arguments


def add(commands) -> None:
    parser = commands.add_parser("generate", parents=[model_arguments("auto"), decoding_arguments()], help="continue a prompt")
    parser.add_argument("--prompt", required=True, metavar="P", help="text to continue")
    parser.add_argument(
        "--json", action="store_true",
        help="print {prompt_token_ids, token_ids, text, seconds}; token_ids and text are the new ones",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments)
    if not tokenizer(arguments.prompt).input_ids:
        raise ValueError("the prompt is empty; pass at least one token")
    prompt = tokenizer(arguments.prompt, return_tensors="pt").input_ids
    model = load_model(arguments)
    started = time.perf_counter()
    output = model.generate(prompt, seed=arguments.seed, **decoding_options(arguments))
    seconds = time.perf_counter() - started
    new = output[0, prompt.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    if not arguments.json:
        print(arguments.prompt + text)
        return
    result = {"prompt_token_ids": prompt[0].tolist(), "token_ids": new.tolist(), "text": text, "seconds": seconds}
    print(json.dumps(result))
