"""The form that each parameter has on the device: its type, and for FP8 weights where their scales are.

| policy | FP8 weights of the files become |
| --- | --- |
| keep | the same FP8 numbers; experts with the published scales of 128×128 blocks, other matrices with the same scales, one for each output channel and block of 128 inputs, because matrices that are merged on the device mix blocks |
| channel | FP8 anew, with one scale an output channel: what the matrix units of a TPU multiply without touching the weights |
| dequantize | the model's dtype |

Weights that are not FP8 in the files stay as they are under every policy.
"""  # noqa: E501, the table

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.fp8 import BLOCK, FP8, blocks
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import Source
from torchqwen_tpu.checkpoint.plan import QUANTIZED_DTYPE, Plan

KEEP_FP32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of parameters that stay FP32 whatever the model's dtype: they steer the recurrent state."""
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MATRICES = (
    "linear_attn.in_proj_qkvz.weight", "linear_attn.out_proj.weight", "self_attn.qkv_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
    "mlp.shared_expert.gate_up_proj.weight", "mlp.shared_expert.down_proj.weight",
)  # fmt: skip
"""Ends of the names of the device's matrices that may be FP8: those that the published checkpoints quantise."""


@dataclass(frozen=True)
class Filling:
    """How one parameter of the device is filled.

    Attributes:
        name: of the parameter.
        index: its place in a stack of parameters of this name; None for a parameter on its own.
        form: "plain", "channel" or "keep".
        dtype: of the parameter.
        parts: by published name, the shape of what the files hold and the tensors that hold it.
    """

    name: str
    index: int | None
    form: str
    dtype: torch.dtype
    parts: dict[str, tuple[tuple[int, ...], list[Source]]]

    @property
    def sources(self) -> Iterator[Source]:
        for _, sources in self.parts.values():
            yield from sources

    @property
    def is_experts(self) -> bool:
        return self.name.endswith(EXPERTS)


def scale_parameter(name: str) -> str:
    """Name of the parameter that holds the scales of the FP8 parameter `name`."""
    return name.removesuffix("_proj") + "_scale" if name.endswith(EXPERTS) else name + "_scale"


def fillings(
    files: CheckpointFiles, model: nn.Module, layout: WeightLayout, plan: Plan, dtype: torch.dtype, policy: str
) -> list[Filling]:
    """How every parameter of `model` (without scales so far) is filled; `dtype` is that of its plain parameters."""
    shapes = {name: layout.to_published(name, value.to("meta")) for name, value in model.named_parameters()}
    forms = {name: _form(files, name, [plan.sources[part] for part in parts], parts, policy) for name, parts in shapes.items()}
    for name in forms:  # the operation takes scales for both matrices of the experts or for neither
        if name.endswith(EXPERTS[0]):
            other = name.removesuffix("gate_up_proj") + "down_proj"
            if "plain" in (forms[name], forms[other]):
                forms[name] = forms[other] = "plain"
    result = []
    for name, parts in shapes.items():
        kept = torch.float32 if name.endswith(KEEP_FP32) else dtype
        described = {part: (tuple(value.shape), plan.sources[part]) for part, value in parts.items()}
        result.append(Filling(name, None, forms[name], kept if forms[name] == "plain" else FP8, described))
    return result


def give_form(model: nn.Module, filling: Filling) -> None:
    """Make the parameter of a model on the meta device what it will be: its type, and a parameter for its scales."""
    value = model.get_parameter(filling.name)
    set_parameter(model, filling.name, value.to(filling.dtype))
    if filling.form == "plain":
        return
    if filling.is_experts:
        rows, columns = value.shape[1:]
        shape = (rows,) if filling.form == "channel" else (blocks(rows), blocks(columns))
        shape = (value.shape[0], *shape)
    else:
        inputs, outputs = value.shape
        shape = (outputs,) if filling.form == "channel" else (blocks(inputs), outputs)
    set_parameter(model, scale_parameter(filling.name), torch.empty(shape, dtype=torch.float32, device="meta"))


def set_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, nn.Parameter(value, requires_grad=False))


def _form(files: CheckpointFiles, name: str, sources: list[list[Source]], parts: dict[str, torch.Tensor], policy: str) -> str:
    dtypes = {files.tensors[source.name].dtype for part in sources for source in part}
    if policy == "dequantize" or dtypes != {QUANTIZED_DTYPE} or not name.endswith((*EXPERTS, *MATRICES)):
        return "plain"
    if policy == "keep" and name.endswith(EXPERTS[0]) and sources[0][0].half is not None:
        (gate_up,) = parts.values()
        if gate_up.shape[1] // 2 % BLOCK:  # the last blocks of gate rows and the first of up rows would be one block
            return "plain"
    return policy
