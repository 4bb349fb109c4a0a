"""The form that each parameter has on the device: its type, and for FP8 weights where their scales are.

What becomes of FP8 weights, by policy:
- "keep": the same FP8 numbers. Experts have the published scales of 128×128 blocks; other matrices the same scales, one for
  each output channel and block of 128 inputs, because matrices that are merged on the device mix the blocks' rows.
- "channel": FP8 anew, with one scale an output channel: what a TPU multiplies without touching the weights again.
- "dequantize": the model's dtype.

Weights that are not FP8 in the files stay as they are under every policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.fp8 import BLOCK, FP8, blocks, scale_shape
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import Source
from torchqwen_tpu.checkpoint.plan import QUANTIZED_DTYPE, Plan, match
from torchqwen_tpu.models.stacking import unstacked

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
        name: of the parameter; in a stack, of the one of this layer.
        holder: the parameter of the model that it is, or a part of.
        index: its place in a stack; None for a parameter on its own.
        form: "plain", "channel" or "keep".
        dtype: of the parameter.
        parts: by published name, the shape of what the files hold and the tensors that hold it.
    """

    name: str
    holder: str
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


def prepare(
    files: CheckpointFiles, model: nn.Module, layout: WeightLayout, dtype: torch.dtype, policy: str
) -> list[Filling]:
    """Give every parameter of `model`, which is on the meta device, the form that the files and the policy ask for.

    Args:
        dtype: of parameters that are not FP8, but for those that stay FP32.

    Returns: how to fill them.

    Raises:
        CheckpointError: a parameter that nothing fills, a tensor that fills nothing, a shape or a type that does not fit.
    """
    plan = match(files, published_parameters(model, layout))
    plan.check(files)
    filled = fillings(files, model, layout, plan, dtype, policy)
    for filling in filled:
        give_form(model, filling)
    return filled


def published_parameters(model: nn.Module, layout: WeightLayout) -> dict[str, torch.Tensor]:
    """Parameters in their published form, on the meta device."""
    parameters = {}
    for name, value in model.named_parameters():
        parameters |= layout.to_published(name, value.to("meta"))
    return parameters


def experts_scale_shape(form: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of FP8 experts [experts, rows, columns]."""
    return tuple(shape[:2]) if form == "channel" else scale_shape(shape)


def fillings(
    files: CheckpointFiles, model: nn.Module, layout: WeightLayout, plan: Plan, dtype: torch.dtype, policy: str
) -> list[Filling]:
    """How every parameter of `model` (without scales so far) is filled; `dtype` is that of its plain parameters."""
    shapes, holders = {}, {}
    for holder, value in model.named_parameters():
        for name, index in unstacked(holder):
            own = value.to("meta") if index is None else value[index].to("meta")
            shapes[name], holders[name] = layout.to_published(name, own), (holder, index)
    forms = {name: _form(files, name, [plan.sources[part] for part in parts], parts, policy) for name, parts in shapes.items()}
    for name in forms:  # the operation takes scales for both matrices of the experts or for neither
        if name.endswith(EXPERTS[0]):
            other = name.removesuffix("gate_up_proj") + "down_proj"
            if "plain" in (forms[name], forms[other]):
                forms[name] = forms[other] = "plain"
    for stack in {holder for holder, index in holders.values() if index is not None}:  # one tensor has one form
        if len({forms[layer] for layer, _ in unstacked(stack)}) > 1:
            forms |= {layer: "plain" for layer, _ in unstacked(stack)}
    result = []
    for name, parts in shapes.items():
        kept = torch.float32 if name.endswith(KEEP_FP32) else dtype
        described = {part: (tuple(value.shape), plan.sources[part]) for part, value in parts.items()}
        result.append(Filling(name, *holders[name], forms[name], kept if forms[name] == "plain" else FP8, described))
    return result


def give_form(model: nn.Module, filling: Filling) -> None:
    """Make the parameter of a model on the meta device what it will be: its type, and a parameter for its scales."""
    if filling.index:  # with the first layer the stack has got its form
        return
    value = model.get_parameter(filling.holder)
    set_parameter(model, filling.holder, value.to(filling.dtype))
    if filling.form == "plain":
        return
    stack, own = ((), value.shape) if filling.index is None else (value.shape[:1], value.shape[1:])
    if filling.is_experts:
        shape = experts_scale_shape(filling.form, own)
    else:
        inputs, outputs = own
        shape = (outputs,) if filling.form == "channel" else (blocks(inputs), outputs)
    scales = torch.empty((*stack, *shape), dtype=torch.float32, device="meta")
    set_parameter(model, scale_parameter(filling.holder), scales)


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
