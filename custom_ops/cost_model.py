"""The one cost model: how bundles, bytes and collectives become times, for the chips that the TPU compiler knows.

What it says is modelled, never measured. `custom_ops.schedule` applies it to one kernel, `torchqwen_tpu.planning` to the
scheduled graph of a whole step; `python -m torchqwen_tpu.planning.calibration` prints it beside published timings. A core
(half a chip of TPU7x, a whole chip of v5e, v5p and v6e) has four servers:

- **Bundles.** A bundle of the compiler's final schedule takes a cycle, and every predicated region counts as taken. A loop
  takes its body times its trip count, in XLA's graphs and within a program; nothing of one turn runs beside the next but what
  the schedule says. Trip counts come from the schedule or the graph where they are constants, and where they are data (tokens
  of a sequence, experts that are hit, pages) from the load that is planned, routing being even and independent. A custom call
  (a Pallas kernel) is its own schedule, counted in the same way. Where the compiler wrote no schedule of a program, XLA's
  `estimated_cycles` stand for it, and tables mark them.
- **HBM.** One queue at the stated bandwidth: what an instruction reads and writes in HBM (operands that lie in VMEM cost
  nothing; of an operand that is only sliced or gathered from, the slices count), and prefetches in the order in which the
  schedule starts them. A kernel counts what it touches under the load, as a function of its own says (`planning.kernels`).
- **ICI.** One queue: a chip's links carry `ici_link` bytes a second each way, spread evenly over the dimensions of the torus
  (a dimension of two chips has one link, longer ones two). XLA's collectives send each core's rows over ICI for
  themselves, so the cores of a chip share its links: an all-gather of N bytes over D devices brings N (D - C) / D bytes
  to each of the C cores of a chip. Each dependent hop adds `HOP` plus `START`. An all-reduce is a reduce-scatter and an
  all-gather. Links are not shared with other collectives than those of the schedule.
- **Die to die.** The cores of one chip are connected at six links' bandwidth; a collective takes the longer of its
  part over ICI and its part between the dies. The hierarchical reduce-scatter has a model of its own on the same constants
  (`custom_ops.reduce_scatter.cost`); beyond 2x2x2 chips its partners are not all neighbours, which it does not count.

What overlaps: an instruction takes the longer of its bundles and its bytes, as kernels and fusions fetch ahead of themselves;
one that finds nothing prefetched also waits `HBM_LATENCY`. A prefetch, and a collective that is asynchronous or on
SparseCore, run beside whatever follows, until the schedule waits for them (-done). Synchronous collectives and collective
kernels stop the core. Instructions do not overlap with each other otherwise, and the host costs nothing.

Where the constants come from:
- TPU7x's clock is not published: 2.2 GHz follows from 1,155 BF16 TFLOP/s and four times 256 x 256 multiplications and
  additions a bundle. Others: published matrix throughput over 2 x (matrix unit)² x multiplications of all units a bundle (v5e,
  128 x 128 and 4 units; v5p two such cores; v6e as TPU7x).
- HBM bandwidth, matrix throughput and VMEM are Google's published figures, which JAX repeats
  (`jax/_src/pallas/mosaic/tpu_info.py`, but for v5p's 2.765 TB/s: 2.46 there); so are ICI's links (90 GB/s each way; v5e 45).
  `hbm_bytes` is what the compiler says that it may use when a program needs more.
- `measured_bandwidth` is what Google saw in its kernels of this model on TPU7x (3.21 of 3.69 TB/s), and the same 87 % for
  others, where it is an assumption.
- `HOP`, `START` and `HBM_LATENCY` are assumed: nothing is published. With them the model of the collectives gives 564 µs and
  284 µs for an all-gather of 8,192 rows of 4,096 on 2x2x1 in BF16 and FP8; 559 and 283 were published (the number of rows is
  our inference).
"""

from __future__ import annotations

from dataclasses import dataclass

HOP = 1e-6
"""Seconds from the start of a remote write, or of a barrier's signal, to its first byte's being seen. Assumed."""
START = 0.25e-6
"""Seconds that a link loses for each remote write. Assumed."""
HBM_LATENCY = 0.5e-6
"""Seconds before the first bytes that an instruction reads from HBM are there. Assumed."""
GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """A TPU, counted by core.

    Args:
        name: what a topology's name starts with.
        device_kind: what the compiler calls its devices.
        cores: devices a chip.
        clock: bundles a second.
        hbm_bytes: HBM of a core that the compiler gives to programs (TPU7x: of 96 GiB).
        hbm_bandwidth, measured_bandwidth: its bytes a second at peak and as measured.
        matrix: operations a second by dtype.
        ici_link: bytes a second over one link of the chip, one way.
        die_to_die: bytes a second between the cores of a chip, one way; 0 for one core.
        vmem_bytes: on-chip memory of a core.
    """

    name: str
    device_kind: str
    cores: int
    clock: float
    hbm_bytes: int
    hbm_bandwidth: float
    measured_bandwidth: float
    matrix: dict[str, float]
    ici_link: float
    die_to_die: float
    vmem_bytes: int

    def matrix_rate(self, dtype: str) -> float:
        """Operations a second in `dtype`; a chip without fast FP8 multiplies it as BF16."""
        return self.matrix.get(dtype, self.matrix["bfloat16"])


TPU7X = Chip(
    name="tpu7x", device_kind="TPU7x", cores=2, clock=2.2e9, hbm_bytes=int(94.75 * GIB), hbm_bandwidth=3.69e12,
    measured_bandwidth=3.21e12, matrix={"bfloat16": 1.155e15, "float8_e4m3fn": 2.3e15}, ici_link=90e9, die_to_die=540e9,
    vmem_bytes=64 << 20,
)  # fmt: skip
V6E = Chip(
    name="v6e", device_kind="TPU v6 lite", cores=1, clock=1.75e9, hbm_bytes=int(31.25 * GIB), hbm_bandwidth=1.64e12,
    measured_bandwidth=1.43e12, matrix={"bfloat16": 9.18e14}, ici_link=90e9, die_to_die=0.0, vmem_bytes=128 << 20,
)  # fmt: skip
V5E = Chip(
    name="v5e", device_kind="TPU v5 lite", cores=1, clock=1.5e9, hbm_bytes=int(15.75 * GIB), hbm_bandwidth=8.19e11,
    measured_bandwidth=7.1e11, matrix={"bfloat16": 1.97e14}, ici_link=45e9, die_to_die=0.0, vmem_bytes=128 << 20,
)  # fmt: skip
V5P = Chip(
    name="v5p", device_kind="TPU v5", cores=1, clock=1.75e9, hbm_bytes=int(95.74 * GIB), hbm_bandwidth=2.765e12,
    measured_bandwidth=2.4e12, matrix={"bfloat16": 4.59e14}, ici_link=90e9, die_to_die=0.0, vmem_bytes=64 << 20,
)  # fmt: skip
CHIPS = {chip.device_kind: chip for chip in (TPU7X, V6E, V5E, V5P)}


@dataclass(frozen=True)
class Links:
    """How the devices of one group of a collective are connected.

    Args:
        devices: in the group.
        chips: that they lie on.
        dimensions: lengths of the torus of these chips, those above 1.
    """

    devices: int
    chips: int
    dimensions: tuple[int, ...]

    @property
    def cores(self) -> int:
        """Of a chip that take part."""
        return max(self.devices // self.chips, 1)

    @property
    def links(self) -> int:
        """ICI links of a chip over which a collective spreads."""
        return sum(1 if length == 2 else 2 for length in self.dimensions)

    @property
    def hops(self) -> int:
        """Dependent hops from one end to the other, the one between cores among them."""
        return sum(length // 2 for length in self.dimensions) + (self.cores > 1)


def collective_time(kind: str, size: int, links: Links, chip: Chip) -> float:
    """Seconds of one collective of XLA.

    Args:
        kind: HLO's name: all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute.
        size: bytes of the whole array on one device: what an all-gather gives, a reduce-scatter or an all-reduce takes;
            of a collective-permute what a device sends.
    """
    if links.devices == 1:
        return 0.0
    if kind == "all-reduce":
        return 2 * collective_time("all-gather", size, links, chip)
    latency = HOP + links.hops * (HOP + START)
    if kind == "collective-permute":
        rate = chip.ici_link if links.chips > 1 else chip.die_to_die
        return HOP + START + size / rate
    if kind == "all-to-all":
        outside = size * (links.devices - links.cores) / links.devices
        return latency + (links.cores * outside / (links.links * chip.ici_link) if links.links else size / chip.die_to_die)
    outside = links.cores * size * (links.devices - links.cores) / links.devices
    inside = (links.cores - 1) * size / links.cores
    over_ici = outside / (links.links * chip.ici_link) if links.links else 0.0
    between_dies = inside / chip.die_to_die if links.cores > 1 else 0.0
    return latency + max(over_ici, between_dies)
