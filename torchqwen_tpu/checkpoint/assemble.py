"""One parameter of the device, put together on the host from the tensors of the files."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import Filling, experts_scale_shape
from torchqwen_tpu.checkpoint.fp8 import dequantize, requantize_channels, row_scales
from torchqwen_tpu.checkpoint.header import DTYPES, CheckpointError
from torchqwen_tpu.checkpoint.host import empty, first_not_finite
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import Source, scale_of
from torchqwen_tpu.checkpoint.plan import QUANTIZED_DTYPE, part_of

Scaled = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor and, if it is FP8, its scales."""
TASK = 16 << 20
"""Bytes of experts, about, that are one thread's task."""
PIECE = 1 << 20
"""Bytes that are read at once and then checked: they are still in the core's cache."""


class _Piece(NamedTuple):
    """What one tensor of the files holds for the experts of a layer, or what it holds for expert `number` if it is of all."""

    source: Source
    number: int | None


class Assembler:
    """Reads the parts of parameters and joins them, several parameters at a time."""

    def __init__(self, files: CheckpointFiles, layout: WeightLayout):
        self._files = files
        self._layout = layout
        self._lock = threading.Lock()
        self._processors = threading.Semaphore(os.cpu_count() or 1)  # more threads than that would only wait for one another
        self._squares: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))

    def start(self, filling: Filling, submit: Callable[..., Future]) -> Callable[[], Scaled]:
        """Begin to put a parameter together, in tasks for threads, which `submit` takes.

        Returns: a function that waits for the parameter in its form on the device; it raises CheckpointError for scales that
            no block can have and for weights that are not finite.
        """
        for source in filling.sources:
            self._files.prefetch(source.name)
        if not filling.is_experts:
            return submit(self._matrix, filling).result
        ((shape, sources),) = filling.parts.values()
        value, scale = empty(shape, filling.dtype), None
        if filling.form != "plain":
            scale = torch.empty(experts_scale_shape(filling.form, shape), dtype=torch.float32)
        pieces = _pieces(sources, shape[0])
        count = max(TASK * len(pieces) // (value.numel() * value.element_size()), 1)
        tasks = [
            submit(self._experts, filling, pieces[first : first + count], value, scale)
            for first in range(0, len(pieces), count)
        ]

        def wait() -> Scaled:
            for task in tasks:
                task.result()
            return value, scale

        return wait

    def errors(self) -> dict[str, float]:
        """See `load_parameters`."""
        return {kind: (error / weights).sqrt().item() for kind, (error, weights) in sorted(self._squares.items())}

    def _matrix(self, filling: Filling) -> Scaled:
        """A parameter of no experts, merged of tensors of the files."""
        values, scales = {}, {}
        for published, (_, (source,)) in filling.parts.items():
            entry = self._files.tensors[source.name]
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            self._read(source.name, tensor)
            scale = read_scale(self._files, source.name) if self._is_quantized(source.name) else None
            values[published], scales[published + "_scale"] = self._converted(filling, source.name, tensor, scale)
        value = self._layout.to_device(filling.name, values).contiguous()
        if filling.form == "plain":
            return value, None
        return value, self._layout.to_device(filling.name + "_scale", scales).contiguous()

    def _experts(self, filling: Filling, pieces: list[_Piece], value: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Fill the parts of `value` and `scale` that these pieces hold."""
        scales: dict[str, torch.Tensor] = {}
        for source, number in pieces:
            name, own = source.name, value[part_of(value.shape, source)]
            dtype = DTYPES[self._files.tensors[name].dtype]
            tensor = own if dtype == own.dtype else torch.empty(own.shape, dtype=dtype)
            self._read(name, tensor, number)
            block_scale = None
            if self._is_quantized(name):
                if name not in scales:
                    scales[name] = read_scale(self._files, name)
                block_scale = scales[name] if number is None else scales[name][number]
            converted, own_scale = self._converted(filling, name, tensor, block_scale)
            if converted is not own:
                own.copy_(converted)
            if scale is not None:
                scale[part_of(scale.shape, source)] = own_scale

    def _converted(self, filling: Filling, name: str, tensor: torch.Tensor, scale: torch.Tensor | None) -> Scaled:
        """A tensor of the files in the form that its parameter wants."""
        if scale is None:
            return self._narrowed(filling, name, tensor), None
        if filling.form == "keep":
            return tensor, scale if filling.is_experts else row_scales(scale, tensor.shape[0])
        if filling.form == "plain":
            wide = torch.float32 if filling.dtype == torch.float16 else filling.dtype
            with self._processors:
                numbers = dequantize(tensor, scale, wide)
            return self._narrowed(filling, name, numbers), None
        with self._processors:
            weight, scale, squares = requantize_channels(tensor, scale)
        with self._lock:
            self._squares[re.sub(r"^.*\.layers\.\d+\.", "", filling.name)] += squares
        return weight, scale

    def _narrowed(self, filling: Filling, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """In the dtype of the parameter; only float16 lacks numbers that others have."""
        result = tensor.to(filling.dtype)
        if filling.dtype == torch.float16 != tensor.dtype and (at := first_not_finite(result)) is not None:
            raise CheckpointError(
                f"{name} in {self._files.tensors[name].file} holds {tensor[tuple(at)].item()} at {at}, more than float16 can; "
                "load it as bfloat16 or float32"
            )
        return result

    def _read(self, name: str, tensor: torch.Tensor, expert: int | None = None) -> None:
        """Fill `tensor` with a tensor of the files, or with its part of one expert.

        Raises:
            CheckpointError: a number is not finite.
        """
        start, is_finite = (expert or 0) * tensor.numel() * tensor.element_size(), True
        for piece in tensor.reshape(-1).split(PIECE // tensor.element_size()):
            self._files.read_into(name, piece, start)
            is_finite = is_finite and first_not_finite(piece) is None
            start += piece.numel() * piece.element_size()
        if not is_finite:
            at = first_not_finite(tensor)
            value = tensor.float()[tuple(at)].item()
            where = at if expert is None else [expert, *at]
            raise CheckpointError(
                f"{name} in {self._files.tensors[name].file} holds {value} at {where}; weights are finite: the file is damaged "
                "or its training diverged"
            )

    def _is_quantized(self, name: str) -> bool:
        return self._files.tensors[name].dtype == QUANTIZED_DTYPE


def _pieces(sources: list[Source], experts: int) -> list[_Piece]:
    pieces = []
    for source in sources:
        if source.expert is None:
            pieces += [_Piece(Source(source.name, expert), expert) for expert in range(experts)]
        else:
            pieces.append(_Piece(source, None))
    return pieces


def read_scale(files: CheckpointFiles, name: str) -> torch.Tensor:
    """The block scales of the FP8 tensor `name` of the files, float32.

    Raises:
        CheckpointError: some are not positive numbers.
    """
    scale = files.read(scale_of(name)).float()
    if not scale.numel():
        return scale
    low, high = scale.aminmax()  # NaN if any is
    if not (low > 0 and high < torch.inf):
        at = (~((scale > 0) & torch.isfinite(scale))).nonzero()[0].tolist()
        raise CheckpointError(
            f"{scale_of(name)} in {files.tensors[scale_of(name)].file} holds {scale[tuple(at)].item()} at {at}; scales are "
            "positive and finite"
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
