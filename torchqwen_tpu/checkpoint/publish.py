"""What a model holds on the devices, as tensors of a checkpoint in the published names and form."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import nn

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import EXPERTS, KEEP_FP32, scale_parameter
from torchqwen_tpu.checkpoint.fp8 import BLOCK, FP8, dequantize, quantize_blocks, scale_shape
from torchqwen_tpu.checkpoint.header import DTYPES
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import (
    SCALE,
    Source,
    expert_name,
    is_carried,
    is_vision,
    parameter_of,
    published_name,
    scale_of,
)  # fmt: skip
from torchqwen_tpu.checkpoint.plan import QUANTIZED_DTYPE, part_of
from torchqwen_tpu.checkpoint.stacks import Stacks
from torchqwen_tpu.checkpoint.writer import Saved
from torchqwen_tpu.models.stacking import unstacked
from torchqwen_tpu.parallel import DeviceMesh

FORMATS = ("bf16", "fp8")
_QUANTIZED = re.compile(
    r".*\.(linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight|self_attn\.[qkvo]_proj\.weight"
    r"|mlp\.(shared_expert\.)?(gate|up|down)_proj\.weight|mlp\.experts\.(gate_up|down)_proj)"
)
"""Published names of the weights that the published FP8 checkpoints quantise."""

Scaled = tuple[torch.Tensor, torch.Tensor | None]
"""A published weight, fused if it is of experts, and its block scales if it is FP8."""


class Publisher:
    """The tensors of a checkpoint of one model.

    Args:
        mesh: where the model lies.
        files: what the model was loaded from; parts that are not built here are copied from there.
        whole_model: whether names are those of the whole model; if not, its vision part is left out.
        format: "bf16", "fp8", or None for what the model holds.
    """

    def __init__(
        self, model: nn.Module, layout: WeightLayout, mesh: DeviceMesh, files: CheckpointFiles | None,
        whole_model: bool, format: str | None,
    ):  # fmt: skip
        self._parameters = {
            name: (holder, value, index) for holder, value in model.named_parameters() for name, index in unstacked(holder)
        }
        self._layout = layout
        self._mesh = mesh
        self._files = files
        self._whole_model = whole_model
        self._format = format
        self._dtype = torch.bfloat16 if format else None
        self._scales = {scale_parameter(name) for name in self._parameters} & set(self._parameters)
        # Of one layer the experts' two matrices, whose tensors alternate in a file.
        self._host = functools.lru_cache(maxsize=2)(self._to_host)
        holds_fp8 = any(value.dtype == FP8 for _, value, _ in self._parameters.values())
        self._writes_fp8 = format == "fp8" or (format is None and holds_fp8)

    @property
    def is_requantized(self) -> bool:
        """Whether FP8 weights have scales of output channels, which the published form has no place for."""
        return any(
            self._meta(name).dim() == (2 if name.removesuffix("_scale") + "_proj" in self._parameters else 1)
            for name in self._scales
        )

    def tensors(self) -> dict[str, Saved]:
        """Tensors by published name."""
        result = dict(self._carried())
        for own in self._parameters:
            if own in self._scales:
                continue
            for part, meta in self._layout.to_published(own, self._meta(own)).items():
                name = published_name(part, self._whole_model)
                quantized = meta.dtype == FP8 or self._format == "fp8" and _QUANTIZED.fullmatch(name)
                held = functools.partial(self._held, own, part)
                if quantized and self._writes_fp8:
                    result |= self._quantized(name, meta.shape, held, meta.dtype == FP8)
                else:
                    kept = torch.float32 if own.endswith(KEEP_FP32) else self._dtype or meta.dtype
                    result[name] = _plain(meta.shape, kept, held)
        return result

    def _meta(self, own: str) -> torch.Tensor:
        _, value, index = self._parameters[own]
        return value.to("meta") if index is None else value.to("meta")[index]

    def _tensor(self, own: str) -> torch.Tensor:
        """A parameter on the host."""
        holder, value, index = self._parameters[own]
        return self._mesh.get(value) if index is None else Stacks(self._mesh).read(holder, value, index)

    def _held(self, own: str, part: str) -> Scaled:
        return self._host(own)[part]

    def _to_host(self, own: str) -> dict[str, Scaled]:
        """A parameter on the host, by the published names of its parts."""
        values = self._layout.to_published(own, self._tensor(own))
        scale = scale_parameter(own)
        if scale not in self._scales:
            return {part: (value, None) for part, value in values.items()}
        held = self._tensor(scale)
        if own.endswith(EXPERTS):
            return {part: (value, held) for part, value in values.items()}
        rows = self._layout.to_published(scale, held)
        return {part: (value, rows[part + "_scale"][::BLOCK]) for part, value in values.items()}

    def _quantized(
        self, name: str, shape: torch.Size, held: Callable[[], Scaled], is_kept: bool
    ) -> Iterator[tuple[str, Saved]]:
        """FP8 tensors of a weight, an expert each, and their scales; these have the type that they were read with."""
        sources = {name: Source(name)}
        if len(shape) == 3:
            halves = (0, 1) if name.endswith("gate_up_proj") else (None,)
            parts = [(expert, half) for expert in range(shape[0]) for half in halves]
            sources = {expert_name(name, *part): Source(name, *part) for part in parts}
        rows = shape[-2] // (2 if name.endswith("experts.gate_up_proj") else 1)
        for own, source in sources.items():
            dtype = self._files.scale_dtype(own) if self._files and is_kept else torch.float32
            meta = torch.empty(rows, shape[-1], dtype=FP8, device="meta")
            scale = torch.empty(scale_shape(meta.shape), dtype=dtype, device="meta")
            yield own, Saved(meta, lambda source=source: _piece(held(), source)[0])
            yield scale_of(own), Saved(scale, lambda source=source, dtype=dtype: _piece(held(), source)[1].to(dtype))

    def _carried(self) -> Iterator[tuple[str, Saved]]:
        """Tensors of parts that are not built here: as they are, unless the format wants FP8 or does not."""
        fp8: dict[str, list[Source]] = defaultdict(list)
        tensors = self._files.tensors if self._files else {}
        for name, entry in tensors.items():
            if not is_carried(name) or (is_vision(name) and not self._whole_model):
                continue
            meta = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            held = functools.partial(lambda name: (self._files.read(name), None), name)
            weight = name.removesuffix(SCALE)
            is_fp8 = scale_of(weight) in tensors and weight in tensors and tensors[weight].dtype == QUANTIZED_DTYPE
            if is_fp8 and not self._writes_fp8:
                if not name.endswith(SCALE):
                    parameter, source = parameter_of(name)
                    fp8[parameter].append(source)
            elif self._format == "fp8" and not (is_fp8 or is_vision(name)) and _QUANTIZED.fullmatch(name):
                yield from self._quantized(name, meta.shape, held, False)
            else:
                yield name, _plain(meta.shape, meta.dtype, held)
        for parameter, sources in fp8.items():
            shape = self._fused_shape(sources)
            dtype = self._dtype or next(iter(self._parameters.values()))[1].dtype
            yield parameter, _plain(shape, dtype, functools.partial(self._dequantized, shape, sources))

    def _fused_shape(self, sources: list[Source]) -> torch.Size:
        shape = self._files.tensors[sources[0].name].shape
        if sources[0].expert is None:
            return torch.Size(shape)
        rows = shape[0] * (1 if sources[0].half is None else 2)
        return torch.Size((1 + max(source.expert for source in sources), rows, shape[1]))

    def _dequantized(self, shape: torch.Size, sources: list[Source]) -> Scaled:
        value = torch.empty(shape)
        for source in sources:
            read = self._files.read(source.name), self._files.read(scale_of(source.name))
            value[part_of(shape, source)] = _widened(*read)
        return value, None


def quantization_settings(tensors: dict[str, Saved]) -> dict:
    """What config.json says of a checkpoint in FP8 (`quantization_config`)."""
    plain = [
        name.removesuffix(".weight") for name, saved in tensors.items()
        if name.endswith(".weight") and saved.meta.dim() > 1 and saved.meta.dtype != FP8 and not is_vision(name)
    ]  # fmt: skip
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*sorted(plain), "model.visual"],
    }


def _plain(shape: torch.Size, dtype: torch.dtype, held: Callable[[], Scaled]) -> Saved:
    return Saved(torch.empty(shape, dtype=dtype, device="meta"), lambda: _widened(*held()).to(dtype))


def _widened(value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return value
    if value.dim() == 3:
        return torch.stack([dequantize(*expert) for expert in zip(value, scale, strict=True)])
    return dequantize(value, scale)


def _piece(held: Scaled, source: Source) -> Scaled:
    """A weight, or the part of one expert, in FP8 with block scales."""
    value, scale = held
    part = part_of(value.shape, source)
    if scale is None:
        return quantize_blocks(value[part])
    if source.half is None or value.shape[1] // 2 % BLOCK == 0:
        return value[part], scale[part_of(scale.shape, source)]
    # A block of the fused weight lies on both sides of the cut.
    return quantize_blocks(dequantize(value[source.expert], scale[source.expert])[part[1]])
