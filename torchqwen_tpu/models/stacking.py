"""Layers that repeat with a period as stacks: one module for layers 0, 4, 8 and so on, each parameter with a dimension more."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

Run = tuple[range, ...]
"""Stacks of equally many layers that take turns: layer 0 of each, then layer 1 of each. A single layer is a stack of one."""
_STACK = re.compile(r"(?<=layers\.)(\d+):(\d+):(\d+)(?=\.)")


def layer_runs(kinds: Sequence[str], scan: bool) -> list[Run]:
    """All layers in order, as runs of stacks.

    Args:
        kinds: of each layer; layers of a kind have parameters of the same shapes.
        scan: whether the longest stretch that repeats (with the shortest period) becomes one run; the layers before
            and after it, and without `scan` all layers, are runs of one.
    """
    first, period, times = _longest_repetition(kinds) if scan else (0, 0, 0)
    end = first + period * times
    runs: list[Run] = [(range(index, index + 1),) for index in range(first)]
    if times:
        runs.append(tuple(range(first + turn, end, period) for turn in range(period)))
    return runs + [(range(index, index + 1),) for index in range(end, len(kinds))]


def stack_name(stack: range) -> str:
    """How a stack is called in the names of its parameters: `3`, or `0:60:4` for layers 0, 4, 8 to 56."""
    return str(stack[0]) if len(stack) == 1 else f"{stack.start}:{stack.stop}:{stack.step}"


def layers_of(name: str) -> tuple[str, ...] | None:
    """What a parameter of a stack is called in each of its layers; None for a parameter that is no stack."""
    match = _STACK.search(name)
    if match is None:
        return None
    return tuple(name[: match.start()] + str(index) + name[match.end() :] for index in range(*map(int, match.groups())))


def unstacked(name: str) -> tuple[tuple[str, int | None], ...]:
    """The parameters that `name` holds, by their names in the layers, and the place of each in the stack: None for a
    parameter that is no stack."""
    layers = layers_of(name)
    return tuple((layer, index) for index, layer in enumerate(layers)) if layers else ((name, None),)


def stack_parameters(layer: nn.Module, count: int) -> nn.Module:
    """Give every parameter of `layer` room for `count` layers, [count, ...]; their values are undefined."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            stacked = torch.empty(count, *parameter.shape, dtype=parameter.dtype, device=parameter.device)
            setattr(module, name, nn.Parameter(stacked, parameter.requires_grad))
    return layer


def _longest_repetition(kinds: Sequence[str]) -> tuple[int, int, int]:
    """First layer, period and number of periods (at least two; all 0 if nothing repeats)."""
    best = (0, 0, 0)
    for period in range(1, len(kinds) // 2 + 1):
        for first in range(len(kinds) - 2 * period + 1):
            end = first + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            times = (end - first) // period
            if times > 1 and times * period > best[1] * best[2]:
                best = (first, period, times)
    return best
