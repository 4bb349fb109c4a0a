"""What `python -m custom_ops.schedule` compiles: one core's share of 397B's layer (16 key and 64 value heads of 128) when
every core owns whole requests, and tokamax's fused convolution and delta rule at the same shapes."""

from __future__ import annotations

import functools

import jax

from custom_ops.gated_delta_net.pallas_decode_memory import TILE
from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape
from custom_ops.schedule.bundles import Loop
from custom_ops.schedule.cases import Case, Program

SHAPE = GatedDeltaNetShape(16, 64, 128, 128)
WIDTH = 4
CHUNK = 64
"""Rows of a chunk: tokamax's, and those that the bound by matrix work counts with."""
TOKAMAX_TILE = 4
"""Sequences that tokamax 0.0.15 decodes at once: of 1, 2, 4 and 8, the tile with the fewest bundles a sequence that
compiles."""
POOL = 8
"""Slots of a core, and sequences that a batch has room for."""


def _pallas(tokens: int, sequences: int, state_dtype: str, decode: bool = False) -> Program:
    from custom_ops.gated_delta_net.pallas_tpu import gated_delta_net

    integers = [_array((sequences,), "int32")] * 4
    arguments = (
        _array((tokens, SHAPE.channels), "bfloat16"),
        *[_array((tokens, SHAPE.value_heads), "float32")] * 2,
        _array((WIDTH, SHAPE.channels), "bfloat16"),
        *[_array((SHAPE.value_heads,), "float32")] * 2,
        *integers,
        *_states(sequences, state_dtype),
    )
    return Program(functools.partial(gated_delta_net, shape=SHAPE, decode=decode), arguments, donated=(10, 11))


def _tokamax(tokens: int, sequences: int, state_dtype: str) -> Program:
    from tokamax._src.ops.causal_conv1d_gated_delta_rule.wrapper import fused_conv1d_gdn

    def function(qkv, b, a, conv, recurrent, weight, a_log, dt_bias, start, slot, distribution, lengths):
        return fused_conv1d_gdn(
            qkv=qkv, b=b, a=a, conv_state=conv, recurrent_state=recurrent, conv_weight=weight, conv_bias=None, a_log=a_log,
            dt_bias=dt_bias, query_start_loc=start, state_indices=slot, distribution=distribution, seq_lens=lengths,
            n_kq=SHAPE.key_heads, n_v=SHAPE.value_heads, d_k=SHAPE.key_dim, d_v=SHAPE.value_dim, kernel_size=WIDTH,
            decode_tile_size=TOKAMAX_TILE, mixed_tile_size=CHUNK,
        )  # fmt: skip

    arguments = (
        _array((tokens, SHAPE.channels), "bfloat16"),
        *[_array((tokens, SHAPE.value_heads), "bfloat16")] * 2,
        *_states(sequences, state_dtype),
        _array((SHAPE.channels, 1, WIDTH), "bfloat16"),
        *[_array((SHAPE.value_heads,), "float32")] * 2,
        *(_array((size,), "int32") for size in (sequences + 1, sequences, 3, sequences)),
    )
    return Program(function, arguments, donated=(3, 4))


def _states(slots: int, dtype: str) -> list[jax.ShapeDtypeStruct]:
    return [
        _array((slots, WIDTH - 1, SHAPE.channels), "bfloat16"),
        _array((slots, SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim), dtype),
    ]


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _bytes(tokens: int, sequences: int, state_dtype: str) -> int:
    """Both states of `sequences` read and written, the rows read and written, the weights of the convolution read."""
    states = sum(2 * array.size * array.dtype.itemsize for array in _states(sequences, state_dtype))
    rows = tokens * (2 * SHAPE.channels + 2 * 4 * SHAPE.value_heads + 2 * SHAPE.value_heads * SHAPE.value_dim)
    return states + rows + 2 * WIDTH * SHAPE.channels


def _decode_flops(sequences: int) -> int:
    """Two products of a vector and the state, and the outer product that updates it."""
    return sequences * SHAPE.value_heads * 3 * 2 * SHAPE.key_dim * SHAPE.value_dim


def _chunk_flops(tokens: int) -> int:
    """Of each chunk: q kᵀ and k kᵀ by key head; by value head three products with the state, two of a triangle with the
    values, and the triangle's inverse."""
    key, value = SHAPE.key_dim, SHAPE.value_dim
    by_key_head = 2 * 2 * CHUNK**2 * key
    by_value_head = 3 * 2 * CHUNK * key * value + 2 * 2 * CHUNK**2 * value + 2 * CHUNK**3 // 3
    return tokens // CHUNK * (SHAPE.key_heads * by_key_head + SHAPE.value_heads * by_value_head)


def _unknown(count: int, kernel: str, loop: Loop) -> int | None:
    """The loop over tiles is the one whose bound is known only when the kernel runs."""
    return count if loop.steps is None else None


def _decode_trips(kernel: str, loop: Loop) -> int | None:
    """No sequence is new, so the short loops that zero a state, head by head, or a tile's windows are not entered."""
    return 0 if loop.steps in (SHAPE.value_heads, TILE) and not loop.inner else None


def _cases(state_dtype: str) -> list[Case]:
    cases = []
    for sequences in (8, 64):
        figures = (_bytes(sequences, sequences, state_dtype), _decode_flops(sequences))
        name = f"decode of {sequences}, {state_dtype} state"
        pallas = functools.partial(_pallas, sequences, sequences, state_dtype, True)
        cases.append(Case(name, "pallas_tpu", pallas, "gated_delta_net_decode", *figures, _decode_trips, figures[0]))
        other = functools.partial(_tokamax, sequences, sequences, state_dtype)
        trips = functools.partial(_unknown, sequences // TOKAMAX_TILE)
        cases.append(Case(name, "tokamax", other, "fused_conv1d_gdn_batched", *figures, trips, requires="tokamax"))
    figures = (_bytes(1024, 1, state_dtype), _chunk_flops(1024))
    name = f"prefill of 1024, {state_dtype} state"
    pallas, other = (functools.partial(build, 1024, POOL, state_dtype) for build in (_pallas, _tokamax))
    trips = functools.partial(_unknown, 1024 // CHUNK)
    cases.append(Case(name, "pallas_tpu", pallas, "gated_delta_net_chunk", *figures, trips, figures[0]))
    cases.append(Case(name, "tokamax", other, "fused_conv1d_gdn_per_seq", *figures, trips, requires="tokamax"))
    return cases


CASES = [case for state_dtype in ("bfloat16", "float32") for case in _cases(state_dtype)]
