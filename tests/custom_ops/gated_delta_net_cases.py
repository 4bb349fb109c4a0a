"""Arguments of Gated DeltaNet for tests, and its implementations held against the reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from comparison import compiled, relative_error

from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.implementations import IMPLEMENTATIONS, supports

OP = "gated_delta_net"
SHAPES = (GatedDeltaNetShape(2, 8, 16, 16), GatedDeltaNetShape(2, 4, 128, 128))
"""An implementation is tested with the first that it takes."""
WIDTH = 4
LENGTHS = (0, 1, 2, 3, 4, 5, 63, 64, 65, 200)
"""Shorter than the convolution, one less and one more than a chunk, several chunks, and nothing at all."""
TOKENS, SEQUENCES = 448, len(LENGTHS)
BOUND = {"xla": 1e-5, "pallas_tpu": 2e-3}
"""Largest relative error (RMS) in FP32, by implementation."""


class Arguments(NamedTuple):
    """Arguments of the operation, in its order."""

    qkv: np.ndarray
    b: np.ndarray
    a: np.ndarray
    conv_weight: np.ndarray
    A_log: np.ndarray
    dt_bias: np.ndarray
    query_start: np.ndarray
    query_length: np.ndarray
    context_length: np.ndarray
    slot: np.ndarray
    conv_state: np.ndarray
    recurrent_state: np.ndarray
    checkpoint_slot: np.ndarray | None = None


class Result(NamedTuple):
    output: np.ndarray
    conv_state: np.ndarray
    recurrent_state: np.ndarray


def shape_of(implementation: str) -> GatedDeltaNetShape:
    return next(shape for shape in SHAPES if supports(OP, implementation, shape))


def parametrize_shapes(*sizes: tuple[int, int, int, int]):
    """Runs a test of `implementation` and `shape` for these sizes, each with the implementations that take it."""
    shapes = [GatedDeltaNetShape(*size) for size in sizes]
    names = [name for name in IMPLEMENTATIONS[OP] if name != "reference"]
    cases = [
        pytest.param(name, shape, id=f"{name}-{shape.key_heads} for {shape.value_heads}, {shape.key_dim} by {shape.value_dim}")
        for name in names
        for shape in shapes
        if supports(OP, name, shape)
    ]
    return pytest.mark.parametrize(("implementation", "shape"), cases)


def arguments(shape, lengths, contexts=0, *, gap=0, slots=SEQUENCES) -> Arguments:
    """Random tokens of sequences laid one after the other, `gap` rows apart, sequence i in slot i of `slots`.

    Always in the same bucket of rows and sequences, so that little is compiled; unused sequences have no rows.
    """
    starts = np.cumsum(np.add(lengths, gap)) - lengths
    contexts = np.broadcast_to(contexts, len(lengths))
    return _arguments(shape, in_bucket(starts), in_bucket(lengths), in_bucket(contexts), TOKENS, slots)


def decode_arguments(shape, active, contexts) -> Arguments:
    """One row a sequence, row i and slot i being sequence i's, whether it is active or not."""
    return _arguments(shape, np.arange(len(active)), active, contexts, len(active), len(active))


def in_bucket(values) -> np.ndarray:
    return np.pad(values, (0, SEQUENCES - len(values))).astype(np.int32)


def _arguments(shape, starts, lengths, contexts, tokens, slots) -> Arguments:
    rng = np.random.default_rng(0)

    def normal(*size):
        return rng.standard_normal(size).astype(np.float32)

    return Arguments(
        qkv=normal(tokens, shape.channels),
        b=2 * normal(tokens, shape.value_heads),
        a=normal(tokens, shape.value_heads),
        conv_weight=normal(WIDTH, shape.channels) / 2,
        A_log=normal(shape.value_heads) / 2 - 1,
        dt_bias=normal(shape.value_heads),
        query_start=np.array(starts, np.int32),
        query_length=np.array(lengths, np.int32),
        context_length=np.array(contexts, np.int32),
        slot=np.arange(len(starts), dtype=np.int32),
        conv_state=normal(slots, WIDTH - 1, shape.channels),
        recurrent_state=normal(slots, shape.value_heads, shape.key_dim, shape.value_dim),
    )


def set_gates(args: Arguments, beta: float | None = None, g: float | None = None, rows=slice(None)) -> None:
    """Make beta (0 or 1) and g (0, or so negative that softplus is the identity) exactly these in the given rows."""
    if beta is not None:
        args.b[rows] = {0.0: -1e4, 1.0: 1e4}[beta]
    if g is not None:
        args.A_log[:], args.dt_bias[:] = 0.0, 0.0
        args.a[rows] = -g if g else -1e4


def run(implementation: str, shape: GatedDeltaNetShape, args: Arguments, decode=False) -> Result:
    return Result(*map(np.asarray, compiled(OP, implementation, shape=shape, decode=decode)(*args)))


def check(implementation: str, shape, args: Arguments, bound: float | None = None, decode=False) -> Result:
    """Assert that an implementation agrees with the reference in output and states; returns its result."""
    bound = BOUND[implementation] if bound is None else bound
    result, expected = run(implementation, shape, args, decode), run("reference", shape, args, decode)
    for name, value in result._asdict().items():
        reference = getattr(expected, name)
        assert value.dtype == reference.dtype and value.shape == reference.shape
        assert relative_error(value, reference) <= bound, name
    return result
