"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

import argparse

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchqwen_tpu.auto import AutoModelForCausalLM
from torchqwen_tpu.checkpoint.resolve import load_config, resolve_folder
from torchqwen_tpu.config import LAYOUTS, ParallelConfig, RuntimeConfig
from torchqwen_tpu.models.causal_lm import CausalLM


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, not {text!r}")
    return int(text)


def positive_list(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def positive_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def model_arguments(dtype: str, required: bool = True, prepares: bool = True) -> argparse.ArgumentParser:
    """Which model, and how it lies on the devices. Not `required`, a command below may ask for the model; `prepares`: it is
    loaded once, and may be saved as it was prepared."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", required=required, metavar="M", help="folder of a checkpoint, or its id on the hub")
    common.add_argument(
        "--dtype", default=dtype, choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto: the checkpoint's (default: %(default)s)",
    )  # fmt: skip
    common.add_argument("--parallel", default="dp", choices=LAYOUTS, help="layout over the devices (default: dp)")
    common.add_argument("--chips", type=positive, metavar="N", help="chips in the mesh (default: all; CPU: 1)")
    common.add_argument("--cores", type=positive, metavar="N", help="cores a chip (default: all; CPU: 1)")
    if prepares:
        common.add_argument(
            "--save-prepared", metavar="DIR",
            help="folder for the weights in the form that the devices hold: written once, then read in place of converting",
        )  # fmt: skip
    return common


def decoding_arguments() -> argparse.ArgumentParser:
    """How a model generates."""
    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="default: %(default)s")
    decoding.add_argument("--greedy", action="store_true", help="take the most likely tokens (default: sample)")
    decoding.add_argument("--seed", type=count, metavar="S", help="of the sampling (default: a new one each time)")
    return decoding


def decoding_options(arguments: argparse.Namespace) -> dict:
    """Arguments of `generate`; what is not given is left to the checkpoint's generation_config.json."""
    options = {"max_new_tokens": arguments.max_new_tokens}
    if arguments.greedy:
        options["do_sample"] = False
    return options


def load_tokenizer(arguments: argparse.Namespace) -> PreTrainedTokenizerBase:
    folder = resolve_folder(arguments.model)
    load_config(folder)  # refuses what is not a checkpoint of this family more clearly than the tokenizer would
    return AutoTokenizer.from_pretrained(folder)


def load_model(arguments: argparse.Namespace, runtime: RuntimeConfig | None = None) -> CausalLM:
    parallel = ParallelConfig(arguments.chips, arguments.cores, arguments.parallel)
    try:
        return AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=arguments.dtype, parallel=parallel, runtime=runtime, save_prepared=arguments.save_prepared
        )
    except RuntimeError as error:  # a mesh that the attached devices do not make up
        raise ValueError(str(error)) from error
