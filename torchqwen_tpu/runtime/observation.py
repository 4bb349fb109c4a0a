"""How what recorders keep leaves a step, and who may look at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.models.qwen3_5 import DecoderOutput
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import Recorder

if TYPE_CHECKING:
    from torchqwen_tpu.runtime.shapes import DecodeShape, ExtendShape

Records = dict[str, torch.Tensor]
"""What the recorders of a step kept, by name, on the device."""


class Extended(NamedTuple):
    """What an extend step gives.

    result: logits [ranks * selected, vocabulary], or scores as `custom_ops.scoring` has them.
    hidden_states: the selected rows of every layer's input and of the last norm's output, if asked for.
    """

    result: torch.Tensor
    hidden_states: list[torch.Tensor]
    records: Records  # of the shape's own recorders


class Observer(Protocol):
    """Sees the steps of a model while it is `Steps.observer`, as soon as they are on their way.

    Attributes:
        recorder: what it wants kept of each step.
    """

    recorder: Recorder

    def due(self, shape: ExtendShape | DecodeShape) -> bool:
        """Whether it is to see the step that comes now; others run as without an observer."""

    def extended(self, shape: ExtendShape, header: torch.Tensor, records: Records) -> None:
        """A step takes the tokens of `header` (as `shape.header` packs it, on the host); records are those of `recorder`."""

    def decoded(self, shape: DecodeShape, header: torch.Tensor, records: Records) -> None:
        """Decode steps run; records have an axis of steps before their own."""


def recorded(
    recorders: tuple[Recorder, ...],
    output: DecoderOutput,
    batch: RaggedBatch,
    select: Callable[[torch.Tensor], torch.Tensor],
    ops: Operations,
) -> list[torch.Tensor]:
    """The tensors of all recorders of a step, flat."""
    tensors = []
    for recorder, layers in zip(recorders, output.records, strict=True):
        tensors += recorder.step(layers, batch, select, ops)
    return tensors


def split_records(
    recorders: tuple[Recorder, ...], outputs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Records]:
    """Outputs of a graph, of which the last belong to these recorders: the others, and the records by name."""
    names = [name for recorder in recorders for name in recorder.names]
    count = len(outputs) - len(names)
    return outputs[:count], dict(zip(names, outputs[count:], strict=True))
