"""Index algebra of the hierarchical collectives, free of any transport.

C chips are the corners of a hypercube of n = log2(C) dimensions; the neighbour of a chip along dimension d is chip XOR 2^d.
Once the cores of a chip have swapped halves, a core has one slab [rows a device, hidden] for each chip: its chip's terms for
the rows that the core of the same number keeps there. The columns are split into n streams, and in each step every stream
crosses another dimension, so that every link carries one of them.

A stream orders its slabs by how their chip differs from this one: slab p is for chip XOR `relative_chip(p)`, in which the
bits of p stand for the dimensions in the order in which the stream crosses them, the first uppermost. A step then always
sends the upper half of what is left and adds what arrives to the lower half, slab 0 is this chip's own, and all places but
those that the first sum reads are constants of the program. An all-gather takes the same steps backwards: in each it sends
all slabs that it has, of which slab 0 is its own, and what arrives becomes as many more.

Neighbours of the hypercube are neighbours on the wires of a 2x2x1 or 2x2x2 torus whose chips are numbered along its axes.
A ring of four is a square too, when the mesh takes its chips in the order 0, 1, 3, 2.
"""

from __future__ import annotations

LANES = 128
CORES = 2
CHIPS = (1, 2, 4, 8, 16, 32, 64)


def refusal(chips: int, cores: int) -> str | None:
    """Why a mesh is no such hypercube; None where it is."""
    if cores != CORES:
        return f"the halves are swapped between {CORES} cores a chip"
    if chips not in CHIPS:
        return f"the chips have to be a power of two up to {CHIPS[-1]}"
    return None


def streams(first: int, last: int, dimensions: int) -> tuple[tuple[int, int], ...]:
    """The columns first..last (last not included) of each stream, in multiples of 128 lanes.

    As even as tiles of 128 allow, the first streams wider; with fewer tiles than dimensions the last streams are empty. A
    chip alone has one stream.
    """
    tiles, count = (last - first) // LANES, max(dimensions, 1)
    edges = [first + LANES * (index * (tiles // count) + min(index, tiles % count)) for index in range(count + 1)]
    return tuple(zip(edges[:-1], edges[1:], strict=True))


def crossed_dimension(stream: int, step: int, dimensions: int) -> int:
    """Dimension of the hypercube that a stream crosses in a step; distinct for the streams of one step."""
    return (stream - step) % dimensions


def relative_chip(slab, stream: int, dimensions: int):
    """What this chip's number is XORed with to give the chip that a slab of a stream is for (slab: int or int32 array).

    The bits of `slab`, rotated to the left by stream + 1: its uppermost one comes to lie on dimension `stream`.
    """
    if not dimensions:
        return slab
    return ((slab << (stream + 1)) | (slab >> (dimensions - stream - 1))) & ((1 << dimensions) - 1)


def step_slabs(step: int, chips: int) -> tuple[int, int]:
    """First slab and number of slabs of a step in the buffers of what is sent and received: each step has its own."""
    return chips - (chips >> step), chips >> (step + 1)
