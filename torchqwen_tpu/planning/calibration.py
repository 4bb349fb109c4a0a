"""The cost model beside published timings of Qwen 3.5-397B on TPU7x: `python -m torchqwen_tpu.planning.calibration`.

The graphs are ours, compiled by the TPU compiler and played in the cost model; the published times (see `published`) are of
other kernels for the same work, so that a difference is the model's error and that of the kernels together. Only the
all-gathers are the same operation on both sides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from custom_ops.cost_model import TPU7X, collective_time
from custom_ops.tpu_compiler import TpuCompilerMissing
from torchqwen_tpu.planning.classes import Classes
from torchqwen_tpu.planning.compile import CompiledStep, compile_steps
from torchqwen_tpu.planning.hlo import parse
from torchqwen_tpu.planning.kernels import Kernels
from torchqwen_tpu.planning.layer import CHIPS, CONFIG, DEVICES, Layer
from torchqwen_tpu.planning.load import Expectations, Load
from torchqwen_tpu.planning.programs import Programs
from torchqwen_tpu.planning.published import COLLECTIVES, EXPERTS, GATED_DELTA_NET, GATED_DELTA_NET_GAIN, HOST
from torchqwen_tpu.planning.simulate import Player
from torchqwen_tpu.planning.table import aligned
from torchqwen_tpu.planning.topologies import find_topology

MACHINE = "tpu7x:2x2x1"
NOT_REPRODUCED = (
    "Not reproduced: the attention kernel (283 µs with pages of 256 tokens), whose number of sequences and lengths were not "
    "published."
)


@dataclass(frozen=True)
class Comparison:
    """Seconds of one thing, published and modelled."""

    what: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1


def collectives() -> Iterator[Comparison]:
    """XLA's all-gathers, which need no compilation."""
    for what, kind, size, published in COLLECTIVES:
        yield Comparison(what, published, collective_time(kind, size, HOST, TPU7X))


def experts(tokens: tuple[int, ...] = tuple(EXPERTS)) -> Iterator[Comparison]:
    """The whole block of routed experts on eight cores, for steps of so many tokens."""
    for count, step in _compiled({count: Layer("ragged_moe", count) for count in tokens}).items():
        load = Load(count // DEVICES, 0, ranks=DEVICES, devices=DEVICES, decode_graph=True)
        seconds = _seconds(step, load, count // DEVICES)
        for name, published in zip(("in production", "best known"), EXPERTS[count], strict=True):
            yield Comparison(f"experts of a layer, {count:,} tokens, {name}", published, seconds)


def gated_delta_net() -> Iterator[Comparison]:
    """Decode with an equal share of the sequences on each core and FP32 states: our inference, the layout is not stated."""
    layers = {count: Layer("gated_delta_net", count // DEVICES) for count in GATED_DELTA_NET}
    for count, step in _compiled(layers).items():
        rows = count // DEVICES
        what = f"Gated DeltaNet, decode of {count} sequences"
        seconds = _seconds(step, Load(rows, 0, decode_graph=True), rows, slots=rows)
        yield Comparison(what, GATED_DELTA_NET[count] / GATED_DELTA_NET_GAIN, seconds)


def _compiled(layers: dict[int, Layer]) -> dict[int, CompiledStep]:
    def say(count: int, what: str) -> None:
        print(f"{layers[count].operation} of {count:,}: {what}", file=sys.stderr, flush=True)

    return compile_steps(layers, say)


def _seconds(step: CompiledStep, load: Load, rows: int, slots: int = 1) -> float:
    module, where = parse(step.hlo), find_topology(MACHINE)
    kernels = Kernels(CONFIG, load, rows, True, 1, 4, CHIPS if load.devices > 1 else 1)
    expected = Expectations(CONFIG, load, rows, slots, 256, kernels.experts.passes)
    programs = Programs(module, step.schedules, kernels.turns, kernels.bytes)
    return Player(module, programs, where.chip, where.places, Classes(()), expected.turns, kernels.seconds).play().seconds


def table(rows: list[Comparison]) -> str:
    cells = [("", "published µs", "modelled µs", "difference")]
    cells += [(row.what, f"{1e6 * row.published:.0f}", f"{1e6 * row.modelled:.0f}", f"{row.error:+.0%}") for row in rows]
    return "\n".join(aligned(cells))


def main() -> None:
    try:
        find_topology(MACHINE)
    except TpuCompilerMissing as error:
        sys.exit(str(error))
    print(table([*collectives(), *gated_delta_net(), *experts()]))
    print(NOT_REPRODUCED)


if __name__ == "__main__":
    main()
