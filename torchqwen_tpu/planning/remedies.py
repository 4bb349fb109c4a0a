"""What would make a model fit, computed: the memory of a core with one thing changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from custom_ops.cost_model import GIB, Chip
from torchqwen_tpu.inputs import limit_of
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning.arguments import sizes_of
from torchqwen_tpu.planning.layouts import AUTO, key_value_copies, meshes, sized_name, with_copies
from torchqwen_tpu.planning.memory import Memory, memory_of
from torchqwen_tpu.planning.request import PlanRequest
from torchqwen_tpu.planning.topologies import larger


@dataclass(frozen=True)
class Remedy:
    """One change of a request, and what a core would have left with it (negative: still missing), in bytes."""

    change: str
    left: int

    def __str__(self) -> str:
        size = f"{abs(self.left) / GIB:.1f} GiB a core"
        return f"{self.change}: {size} left" if self.left >= 0 else f"{self.change}: not enough, {size} still missing"


def remedies(
    request: PlanRequest, config: PretrainedConfig, chip: Chip, mesh: DeviceMesh, memory: Memory
) -> tuple[Remedy, ...]:
    """What would help a layout that does not fit. Temporaries and programs are taken as they are in `memory`."""
    beside = memory.padding + memory.temporaries + memory.code

    def left(changed: PlanRequest, mesh: DeviceMesh) -> int | None:
        """None where the layout does not suit the model."""
        try:
            own = with_copies(config, key_value_copies(config, mesh))
            sizes = sizes_of(own, mesh, changed)
        except ValueError:
            return None
        return memory_of(sizes, (), changed, chip, mesh.ranks, limit_of(config.get_text_config())).left - beside

    def found() -> Iterator[tuple[str, PlanRequest, DeviceMesh]]:
        if concurrency := memory.largest_concurrency:
            yield f"a concurrency of {concurrency:,}", dataclasses.replace(request, concurrency=concurrency), mesh
        if context := memory.largest_context:
            change = dataclasses.replace(request, input_len=max(context - request.output_len, 1))
            if change.total_len <= context:
                yield f"{change.input_len:,} + {change.output_len:,} tokens a sequence", change, mesh
        if request.state_dtype == "float32":
            yield "recurrent states in BF16", dataclasses.replace(request, state_dtype="bfloat16"), mesh
        if request.kv_dtype == "bf16":
            yield "KV pages in FP8", dataclasses.replace(request, kv_dtype="fp8"), mesh
        if request.dtype == "bf16":
            yield "FP8 weights", dataclasses.replace(request, dtype="fp8"), mesh
        for other in meshes(AUTO, mesh.chips, mesh.cores):
            if other != mesh and key_value_copies(config, other) == 1:
                yield f"layout {sized_name(other)}", request, other

    computed = [Remedy(what, size) for what, changed, other in found() if (size := left(changed, other)) is not None]
    for name, chips in larger(request.topology, chip):
        size = left(request, DeviceMesh(chips, mesh.cores, mesh.layout))
        if size is not None and size >= 0:
            computed.append(Remedy(f"topology {name} ({chips} chips)", size))
            break
    return tuple(sorted(computed, key=lambda remedy: remedy.left < 0))
