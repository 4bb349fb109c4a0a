"""From bundles and bytes to times, on one core (half a chip) of TPU7x."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from custom_ops.cost_model import TPU7X
from custom_ops.schedule.bundles import Loop
from custom_ops.schedule.cases import Case
from custom_ops.schedule.measure import Measurement

CLOCK = TPU7X.clock
HBM_BYTES_PER_SECOND = TPU7X.hbm_bandwidth
MATRIX_FLOPS_PER_SECOND = TPU7X.matrix["bfloat16"]
"""BF16. A product of FP32 arrays takes several passes, which this bound does not count."""

STATEMENT = (
    f"Model: one core of TPU7x, a bundle a cycle at {CLOCK / 1e9:.1f} GHz (inferred, not published), HBM at "
    f"{HBM_BYTES_PER_SECOND / 1e12:.2f} TB/s, both at once: the modelled time of a kernel is the longer of the two. Every "
    "predicated region counts as taken, arrays start in HBM, stalls on DMAs and XLA's own work around the kernel are left out. "
    "Bounds: the least bytes at that bandwidth, and the matrix work at "
    f"{MATRIX_FLOPS_PER_SECOND / 1e12:,.0f} TFLOP/s (BF16)."
)


@dataclass(frozen=True)
class Row:
    """A case with its figures; times in microseconds.

    hbm_bytes: what the kernels move: as the case says, or what all DMAs of the schedule move if no condition ever holds one
        back, or (where sizes are known only when it runs) the least that has to move.
    hbm_bytes_from: 'case', 'schedule' or 'least'.
    """

    operation: str
    case: str
    implementation: str
    bundles: int
    bundle_time: float
    hbm_bytes: int
    hbm_bytes_from: str
    hbm_time: float
    time: float
    byte_bound: float
    matrix_bound: float
    over_byte_bound: float
    spills_in_loops: int
    vmem_bytes: int
    xla_cycles: int
    kernels: list[dict]


def row(operation: str, case: Case, measured: Measurement) -> Row:
    """The figures of a measured case."""
    bundles_of = [kernel.program.bundles() for kernel in measured.kernels]
    bundles, declared = round(sum(bundles_of)), [case.kernel_bytes(kernel.name) for kernel in measured.kernels]
    moved = [
        kernel.program.bytes_moved() if size is None else round(size)
        for kernel, size in zip(measured.kernels, declared, strict=True)
    ]
    if case.moved_bytes is not None:
        hbm_bytes, source = case.moved_bytes, "case"
    elif None not in moved:
        hbm_bytes, source = sum(moved), "schedule" if None in declared else "case"
    else:
        hbm_bytes, source = case.hbm_bytes, "least"
    bundle_time, hbm_time = 1e6 * bundles / CLOCK, 1e6 * hbm_bytes / HBM_BYTES_PER_SECOND
    byte_bound = 1e6 * case.hbm_bytes / HBM_BYTES_PER_SECOND
    if case.moved_bytes is None and None not in moved:  # one kernel after the other
        time = sum(map(_time, bundles_of, moved))
    else:
        time = max(bundle_time, hbm_time)
    return Row(
        operation=operation,
        case=case.name,
        implementation=case.implementation,
        bundles=bundles,
        bundle_time=bundle_time,
        hbm_bytes=hbm_bytes,
        hbm_bytes_from=source,
        hbm_time=hbm_time,
        time=time,
        byte_bound=byte_bound,
        matrix_bound=1e6 * case.matrix_flops / MATRIX_FLOPS_PER_SECOND,
        over_byte_bound=time / byte_bound,
        spills_in_loops=sum(
            loop.vector_spills for kernel in measured.kernels for loop in list(kernel.program.walk())[1:]
        ),
        vmem_bytes=max(kernel.vmem_bytes for kernel in measured.kernels),
        xla_cycles=measured.xla_cycles,
        kernels=[
            {"name": kernel.name, "loops": list(_loops(kernel.program, 1, 0)), "vmem_bytes": kernel.vmem_bytes}
            for kernel in measured.kernels
        ],
    )


def _time(bundles: float, moved: int) -> float:
    """Microseconds of one kernel."""
    return 1e6 * max(bundles / CLOCK, moved / HBM_BYTES_PER_SECOND)


def _loops(loop: Loop, entered: int, depth: int) -> Iterator[dict]:
    times = entered * loop.steps
    yield {
        "depth": depth,
        "first_bundle": loop.first,
        "bundles": loop.own,
        "times": times,
        "pipeline_iterations": loop.extra,
        "vector_spills": loop.vector_spills,
        "scalar_spills": loop.word_spills,
        "busiest_unit": loop.busiest,
    }
    for inner in loop.inner:
        yield from _loops(inner, times, depth + 1)
