"""Commands of the command line, one a module.

A module has `add(commands)`, which adds its parser to argparse's subparsers; the parser's default `run` takes the parsed
arguments, prints results to stdout and returns the exit status (None for 0). OSError and ValueError become one line on
stderr and exit status 2.
"""

from torchqwen_tpu.commands import bench, chat, compare, evaluate, generate, inspect, plan, score

COMMANDS = (generate, chat, evaluate, score, compare, bench, inspect, plan)
"""In the order in which the help lists them."""
