"""Command line: results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchqwen_tpu.commands import COMMANDS

BAD_INPUT = 2
"""Exit status for arguments or a checkpoint that cannot be used, as argparse has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except (OSError, ValueError) as error:
        print(f"torchqwen-tpu {arguments.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """One line for an error, without the usage before it."""

    def error(self, message: str):
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchqwen-tpu",
        description="Run Qwen 3.5 (mixture of experts and dense) with PyTorch/XLA on TPUs or on a CPU.",
        epilog="Example: torchqwen-tpu generate --model examples/tiny-qwen3.5-moe --prompt 'import os' --greedy",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
