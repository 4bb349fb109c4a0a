"""One parameter of the device, put together on the host from the tensors of the files."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator

import torch

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import Filling, experts_scale_shape
from torchqwen_tpu.checkpoint.fp8 import dequantize, quantize_channels, row_scales
from torchqwen_tpu.checkpoint.header import CheckpointError
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import Source, scale_of
from torchqwen_tpu.checkpoint.plan import QUANTIZED_DTYPE, part_of

Scaled = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor and, if it is FP8, its scales."""


class Assembler:
    """Reads the parts of parameters and joins them; `assemble` may run in several threads."""

    def __init__(self, files: CheckpointFiles, layout: WeightLayout):
        self._files = files
        self._layout = layout
        self._lock = threading.Lock()
        self._squares: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))

    def assemble(self, filling: Filling) -> Scaled:
        """The parameter in its form on the device.

        Raises:
            CheckpointError: scales that no block can have.
        """
        for source in filling.sources:
            self._files.prefetch(source.name)
        values, scales = {}, {}
        for published, (shape, sources) in filling.parts.items():
            values[published], scales[published + "_scale"] = self._published(filling, shape, sources)
        value = self._layout.to_device(filling.name, values)
        if filling.form == "plain":
            return value, None
        if filling.is_experts:
            return value, *scales.values()
        return value, self._layout.to_device(filling.name + "_scale", scales)

    def errors(self) -> dict[str, float]:
        """See `load_parameters`."""
        return {kind: (error / weights).sqrt().item() for kind, (error, weights) in sorted(self._squares.items())}

    def _published(self, filling: Filling, shape: tuple[int, ...], sources: list[Source]) -> Scaled:
        """One published tensor: of one tensor of the files, or of those of all experts."""
        fused = sources[0].expert is None
        if fused and (len(shape) < 3 or filling.form == "keep" or not self._is_quantized(sources[0].name)):
            return self._converted(filling, *self._read(sources[0].name))
        value, scale = torch.empty(shape, dtype=filling.dtype), None
        if filling.form != "plain":
            scale = torch.empty(experts_scale_shape(filling.form, shape), dtype=torch.float32)
        for source, tensor, block_scale in self._single_experts(shape, sources):
            piece, piece_scale = self._converted(filling, tensor, block_scale)
            value[part_of(shape, source)] = piece
            if scale is not None:
                scale[part_of(scale.shape, source)] = piece_scale
        return value, scale

    def _single_experts(
        self, shape: tuple[int, ...], sources: list[Source]
    ) -> Iterator[tuple[Source, torch.Tensor, torch.Tensor | None]]:
        """Expert by expert what the files hold: where it belongs, numbers and block scales."""
        for source in sources:
            tensor, scale = self._read(source.name)
            if source.expert is not None:
                yield source, tensor, scale
            else:
                for expert in range(shape[0]):
                    yield Source(source.name, expert), tensor[expert], scale[expert]
            self._files.release(source.name)

    def _converted(self, filling: Filling, tensor: torch.Tensor, scale: torch.Tensor | None) -> Scaled:
        """A tensor of the files in the form that its parameter wants."""
        if scale is None:
            return tensor.to(filling.dtype), None
        if filling.form == "keep":
            return tensor, scale if filling.is_experts else row_scales(scale, tensor.shape[0])
        weight = dequantize(tensor, scale)
        if filling.form == "plain":
            return weight.to(filling.dtype), None
        quantized, scale = quantize_channels(weight)
        self._note_error(filling.name, weight, quantized, scale)
        return quantized, scale

    def _note_error(self, name: str, weight: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> None:
        error = torch.addcmul(weight, quantized.float(), scale[:, None], value=-1)
        squares = torch.stack([error.square().sum(), weight.square().sum()]).double()
        with self._lock:
            self._squares[re.sub(r"^.*\.layers\.\d+\.", "", name)] += squares

    def _is_quantized(self, name: str) -> bool:
        return self._files.tensors[name].dtype == QUANTIZED_DTYPE

    def _read(self, name: str) -> Scaled:
        """A tensor of the files and its block scales in float32."""
        tensor = self._files.read(name)
        return tensor, read_scale(self._files, name) if self._is_quantized(name) else None


def read_scale(files: CheckpointFiles, name: str) -> torch.Tensor:
    """The block scales of the FP8 tensor `name` of the files, float32.

    Raises:
        CheckpointError: some are not positive numbers.
    """
    entry = files.tensors[scale_of(name)]
    scale = files.read(scale_of(name)).float()
    wrong = ~((scale > 0) & torch.isfinite(scale))
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"{scale_of(name)} in {entry.file} holds {scale[tuple(at)].item()} at {at}; scales are positive and finite"
        )
    return scale


def check_scales(files: CheckpointFiles, filling: Filling) -> list[str]:
    """What is wrong with the scales of a parameter's tensors."""
    problems = []
    for source in filling.sources:
        if files.tensors[source.name].dtype == QUANTIZED_DTYPE:
            try:
                read_scale(files, source.name)
            except CheckpointError as error:
                problems.append(str(error))
    return problems
