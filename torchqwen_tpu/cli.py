"""Command line: `torchqwen-tpu generate | chat | evaluate | bench`. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.benchmark import PEERS, Sizes, format_table, measure
from torchqwen_tpu.chat import Conversation
from torchqwen_tpu.checkpoint.resolve import load_config, resolve_folder
from torchqwen_tpu.config import LAYOUTS, ParallelConfig
from torchqwen_tpu.evaluation.command import check_tasks, evaluate, format_results, write_results
from torchqwen_tpu.models.causal_lm import CausalLM

BAD_INPUT = 2
"""Exit status for arguments or a checkpoint that cannot be used, as argparse has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (OSError, ValueError) as error:
        print(f"torchqwen-tpu {arguments.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    return 0


def _generate(arguments: argparse.Namespace) -> None:
    tokenizer = _tokenizer(arguments)
    if not tokenizer(arguments.prompt).input_ids:
        raise ValueError("the prompt is empty; pass at least one token")
    prompt = tokenizer(arguments.prompt, return_tensors="pt").input_ids
    model = _model(arguments)
    started = time.perf_counter()
    output = model.generate(prompt, seed=arguments.seed, **_options(arguments))
    seconds = time.perf_counter() - started
    new = output[0, prompt.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    if not arguments.json:
        print(arguments.prompt + text)
        return
    result = {"prompt_token_ids": prompt[0].tolist(), "token_ids": new.tolist(), "text": text, "seconds": seconds}
    print(json.dumps(result))


def _chat(arguments: argparse.Namespace) -> None:
    tokenizer = _tokenizer(arguments)
    conversation = Conversation(_model(arguments), tokenizer, arguments.seed, **_options(arguments))
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


def _evaluate(arguments: argparse.Namespace) -> None:
    tokenizer = _tokenizer(arguments)
    check_tasks(arguments.tasks, arguments.include_path)
    results = evaluate(
        _model(arguments), tokenizer, arguments.tasks,
        include_path=arguments.include_path, num_fewshot=arguments.num_fewshot, batch_size=arguments.batch_size,
        limit=arguments.limit, max_length=arguments.max_length, log_samples=arguments.log_samples,
    )  # fmt: skip
    if arguments.output:
        write_results(results, Path(arguments.output))
    print(format_results(results))


def _bench(arguments: argparse.Namespace) -> None:
    folder = resolve_folder(arguments.model)
    load_config(folder)
    sizes = Sizes(tuple(arguments.batch), arguments.prompt_tokens, arguments.new_tokens, arguments.prefill_tokens)
    report = measure(_model(arguments), folder, arguments.against, sizes, arguments.pairs)
    print(json.dumps(report) if arguments.json else format_table(report))


def _tokenizer(arguments: argparse.Namespace) -> PreTrainedTokenizerBase:
    folder = resolve_folder(arguments.model)
    load_config(folder)  # refuses what is not a checkpoint of this family more clearly than the tokenizer would
    return AutoTokenizer.from_pretrained(folder)


def _model(arguments: argparse.Namespace) -> CausalLM:
    parallel = ParallelConfig(arguments.chips, arguments.cores, arguments.parallel)
    try:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, parallel=parallel)
    except RuntimeError as error:  # a mesh that the attached devices do not make up
        raise ValueError(str(error)) from error


def _options(arguments: argparse.Namespace) -> dict:
    """Arguments of `generate`; what is not given is left to the checkpoint's generation_config.json."""
    options = {"max_new_tokens": arguments.max_new_tokens}
    if arguments.greedy:
        options["do_sample"] = False
    return options


class _Parser(argparse.ArgumentParser):
    """One line for an error, without the usage before it."""

    def error(self, message: str):
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, not {text!r}")
    return int(text)


def _positive_list(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive_or_auto(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _common(dtype: str) -> argparse.ArgumentParser:
    """Arguments of every command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", required=True, metavar="M", help="folder of a checkpoint, or its id on the hub")
    common.add_argument(
        "--dtype", default=dtype, choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto: the checkpoint's (default: %(default)s)",
    )  # fmt: skip
    common.add_argument("--parallel", default="dp", choices=LAYOUTS, help="layout over the devices (default: dp)")
    common.add_argument("--chips", type=_positive, metavar="N", help="chips in the mesh (default: all; CPU: 1)")
    common.add_argument("--cores", type=_positive, metavar="N", help="cores a chip (default: all; CPU: 1)")
    return common


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchqwen-tpu",
        description="Run Qwen 3.5 (mixture of experts and dense) with PyTorch/XLA on TPUs or on a CPU.",
        epilog="Example: torchqwen-tpu generate --model examples/tiny-qwen3.5-moe --prompt 'import os' --greedy",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="default: %(default)s")
    decoding.add_argument("--greedy", action="store_true", help="take the most likely tokens (default: sample)")
    decoding.add_argument("--seed", type=_count, metavar="S", help="of the sampling (default: a new one each time)")

    generate = commands.add_parser("generate", parents=[_common("auto"), decoding], help="continue a prompt")
    generate.add_argument("--prompt", required=True, metavar="P", help="text to continue")
    generate.add_argument(
        "--json", action="store_true",
        help="print {prompt_token_ids, token_ids, text, seconds}; token_ids and text are the new ones",
    )  # fmt: skip
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat", parents=[_common("auto"), decoding], help="talk to a model, a line a turn, up to /exit"
    )
    chat.set_defaults(run=_chat)

    evaluation = commands.add_parser(
        "evaluate", parents=[_common("auto")], help="run tasks of lm-eval",
        description="Runs tasks of lm-eval and prints its table. With --dtype float32 every score is what one request at a "
        "time gives in float32.",
    )  # fmt: skip
    evaluation.add_argument("--tasks", required=True, type=lambda text: text.split(","), metavar="T,T", help="names of tasks")
    evaluation.add_argument("--include-path", metavar="D", help="folder of further task files")
    evaluation.add_argument("--num-fewshot", type=_count, metavar="N", help="examples in the prompt (default: the task's)")
    evaluation.add_argument(
        "--batch-size", type=_positive_or_auto, default="auto", metavar="N", help="sequences at once, a core that owns requests"
    )
    evaluation.add_argument("--limit", type=_positive, metavar="N", help="take only the first N documents of each task")
    evaluation.add_argument("--max-length", type=_positive, metavar="N", help="longest input (default: the model's limit)")
    evaluation.add_argument("--output", metavar="F", help="also write everything to this JSON file")
    evaluation.add_argument("--log-samples", action="store_true", help="with --output: every document's result too")
    evaluation.set_defaults(run=_evaluate)

    bench = commands.add_parser(
        "bench", parents=[_common("float32")], help="measure greedy generation and prefill",
        description="Greedy generation of random prompts with stop tokens off, and prefill of one prompt. After a "
        "warm-up that compiles, both libraries are measured in turn; each figure is the median.",
    )  # fmt: skip
    bench.add_argument("--batch", type=_positive_list, default="1,8,64", metavar="B,B", help="default: %(default)s")
    bench.add_argument("--prompt-tokens", type=_positive, default=32, metavar="N", help="default: %(default)s")
    bench.add_argument("--new-tokens", type=_positive, default=64, metavar="N", help="default: %(default)s")
    bench.add_argument("--prefill-tokens", type=_count, default=4096, metavar="N", help="default: %(default)s; 0: none")
    bench.add_argument("--against", choices=PEERS, help="another library to measure beside this one")
    bench.add_argument("--pairs", type=_positive, default=5, metavar="N", help="measurements (default: %(default)s)")
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")
    bench.set_defaults(run=_bench)
    return parser


if __name__ == "__main__":
    sys.exit(main())
