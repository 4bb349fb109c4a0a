"""Names of tensors in checkpoint files against names of parameters in the model."""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "model.language_model."
"""Prefix of the text model's tensors in checkpoints of the whole model; `model.` in those of the text model alone."""

VISION = ("model.visual.", "visual.")
CARRIED = ("mtp.", "model.mtp.", *VISION)
"""Tensors of parts that are not built here (multi-token prediction, vision); they are kept for `save_pretrained`."""

SCALE = "_scale_inv"
"""A tensor's name and this is the name of its block scales."""

_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


@dataclass(frozen=True)
class Source:
    """A tensor of a file and the part of a parameter that it fills.

    Attributes:
        name: name in the file.
        expert: which expert of a fused parameter; None for the whole parameter.
        half: 0 for the gate rows, 1 for the up rows of `gate_up_proj`; None for all rows.
    """

    name: str
    expert: int | None = None
    half: int | None = None


def scale_of(name: str) -> str:
    """Name of the block scales of the tensor `name`."""
    return name + SCALE


def expert_name(parameter: str, expert: int, half: int | None) -> str:
    """Name of one expert's tensor that holds a part of the fused `parameter` (the reverse of `parameter_of`)."""
    stem, _, fused = parameter.rpartition(".")
    part = fused if half is None else ("gate_proj", "up_proj")[half]
    return f"{stem}.{expert}.{part}.weight"


def is_carried(name: str) -> bool:
    return name.startswith(CARRIED)


def is_vision(name: str) -> bool:
    return name.startswith(VISION)


def parameter_of(name: str) -> tuple[str, Source]:
    """The parameter that the tensor `name` of a file belongs to, and the part of it."""
    parameter = "model." + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name
    match = _EXPERT.match(parameter)
    if match is None:
        return parameter, Source(name)
    expert = int(match["number"])
    if match["part"] == "down":
        return f"{match['experts']}.down_proj", Source(name, expert)
    return f"{match['experts']}.gate_up_proj", Source(name, expert, ("gate", "up").index(match["part"]))


def published_name(parameter: str, whole_model: bool) -> str:
    """Name in a file of the parameter, in a checkpoint of the whole model or of the text model alone."""
    if whole_model and parameter.startswith("model."):
        return PREFIX + parameter.removeprefix("model.")
    return parameter
