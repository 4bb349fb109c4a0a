"""Parallelism as data: modules and operations name logical axes, this table maps them to mesh axes.

A new layout is a new row.
"""

from __future__ import annotations

from torchqwen_tpu.models.stacking import layers_of

LAYOUT_RULES: dict[str, dict[str, tuple[str, ...]]] = {
    # logical axis: mesh axes that split it
    "dp": {"tokens": ("chip", "core"), "pages": ("chip", "core"), "heads": (), "experts": ("chip", "core")},
    "dp_tp": {"tokens": ("chip",), "pages": ("chip",), "heads": ("core",), "experts": ("chip", "core")},
    "tp": {"tokens": (), "pages": (), "heads": ("chip", "core"), "experts": ("chip", "core")},
}

PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    # end of the parameter's name: logical axis of each dimension on the device, where matrices are [in, out];
    # all other parameters are replicated
    "linear_attn.in_proj_qkvz.weight": (None, "heads"),
    "linear_attn.in_proj_ba.weight": (None, "heads"),
    "linear_attn.conv1d.weight": ("heads", None, None),
    "linear_attn.A_log": ("heads",),
    "linear_attn.dt_bias": ("heads",),
    "linear_attn.out_proj.weight": ("heads", None),
    "self_attn.qkv_proj.weight": (None, "heads"),
    "self_attn.qkv_proj.bias": ("heads",),
    "self_attn.o_proj.weight": ("heads", None),
    "mlp.experts.gate_up_proj": ("experts", None, None),
    "mlp.experts.down_proj": ("experts", None, None),
    "mlp.experts.gate_up_scale": ("experts", None, None),
    "mlp.experts.down_scale": ("experts", None, None),
}


def parameter_axes(name: str, dimensions: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter called `name`; a stack of layers is not split by layer. The scales of a matrix are split
    as its output channels are."""
    if layers_of(name):
        return (None, *parameter_axes(layers_of(name)[0], dimensions - 1))
    if name.endswith("weight_scale"):
        return (None,) * (dimensions - 1) + parameter_axes(name.removesuffix("_scale"), 2)[-1:]
    for ending, axes in PARAMETER_AXES.items():
        if name.endswith(ending):
            return axes[:dimensions]
    return (None,) * dimensions
