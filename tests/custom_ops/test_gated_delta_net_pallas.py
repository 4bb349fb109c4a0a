"""The Pallas kernels of Gated DeltaNet: what only they do, in the interpreter, and compilation for Ironwood.

The tests of every implementation (`test_gated_delta_net.py`) run them too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import relative_error
from gated_delta_net_cases import Arguments, arguments, check, decode_arguments, in_bucket, run, set_gates

from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.gated_delta_net.pallas_tpu import gated_delta_net, supports
from custom_ops.gated_delta_net.tiling import CHUNK, FIRST, FRESH, LAST, OPENS, chunk_table
from custom_ops.tpu_compiler import compile_jax

PALLAS = "pallas_tpu"
BFLOAT16_STATE = 5e-3
SHAPE = GatedDeltaNetShape(2, 4, 128, 128)
PUBLISHED = GatedDeltaNetShape(16, 64, 128, 128)
SLOTS = 64
"""So many that a copy of a pool would be larger than everything else a call needs."""


def rounded(args: Arguments) -> tuple[Arguments, Arguments]:
    """Arguments whose recurrent states BF16 holds exactly, stored in FP32 and in BF16."""
    states = jnp.asarray(args.recurrent_state, jnp.bfloat16)
    return args._replace(recurrent_state=np.array(states.astype(jnp.float32))), args._replace(recurrent_state=states)


def test_states_in_bfloat16_and_their_update_by_products():
    """With eight key heads the matrix unit updates a part of the states; g from 0 to where exp(g) is 0."""
    shape = GatedDeltaNetShape(8, 8, 128, 128)
    args = decode_arguments(shape, [1, 1, 1, 0, 1, 1, 1, 1], [4, 0, 2, 3, 9, 9, 9, 9])
    set_gates(args, g=0.0)
    for row, g in enumerate((0.0, -1e-3, -0.5, -5.0, -50.0, -88.0, -1e5, -1e5)):
        args.a[row] = -g if g else -1e4
    exact, stored = rounded(args)
    result, expected = run(PALLAS, shape, stored, decode=True), run("reference", shape, exact, decode=True)
    for sequence in range(8):
        assert relative_error(result.output[sequence], expected.output[sequence]) <= BFLOAT16_STATE
        assert relative_error(result.recurrent_state[sequence], expected.recurrent_state[sequence]) <= BFLOAT16_STATE


def test_checkpoints_of_a_sequence_longer_than_the_window():
    """Its first rows go through the decode kernel, the rest through chunks; one of three rows goes through one kernel."""
    args = arguments(SHAPE, [70, 3, 1, 64], [0, 5, 2, 3], slots=16)
    keep = np.full((len(args.slot), 3), -1, np.int32)
    keep[0], keep[1] = (10, 11, 12), (13, -1, -1)
    result = check(PALLAS, SHAPE, args._replace(checkpoint_slot=keep))
    assert not np.array_equal(result.recurrent_state[10], result.recurrent_state[11])


@pytest.mark.parametrize("start", [0, 1, 61, 63, 64])
def test_a_sequence_may_begin_anywhere_in_a_block_of_rows(start):
    """What lies before and behind it must not matter, NaN included."""
    args = arguments(SHAPE, [66], [4])
    args = args._replace(query_start=in_bucket([start]))
    args.qkv[:start], args.qkv[start + 66 :] = np.nan, np.nan
    args.b[start + 66 :], args.a[:start] = np.nan, np.nan
    result = check(PALLAS, SHAPE, args)
    assert not result.output[:start].any() and not result.output[start + 66 :].any()


def test_a_broken_sequence_leaves_its_neighbours_alone():
    args = arguments(SHAPE, [1, 1, 40, 40], [3, 3, 3, 3])
    expected = run(PALLAS, SHAPE, args)
    args.recurrent_state[[0, 2]] = np.nan
    result = run(PALLAS, SHAPE, args)
    for sequence in (1, 3):
        rows = slice(args.query_start[sequence], args.query_start[sequence] + args.query_length[sequence])
        np.testing.assert_array_equal(result.output[rows], expected.output[rows])
        np.testing.assert_array_equal(result.recurrent_state[sequence], expected.recurrent_state[sequence])


def test_chunk_table():
    """Rows 60 to 199 and 200 to 209 are taken, of 320: every block of 64 rows has a chunk, in the order of the rows."""
    count, block, slot, begin, end, flags = chunk_table(
        jnp.array([200, 0, 60]), jnp.array([10, 0, 140]), jnp.array([False, True, True]), jnp.array([7, 8, 9]), 320
    )
    assert count == 6
    np.testing.assert_array_equal(block[:6], [0, 1, 2, 3, 3, 4])
    np.testing.assert_array_equal(begin[:6], [60, 0, 0, 0, 8, 0])
    np.testing.assert_array_equal(end[:6], [CHUNK, CHUNK, CHUNK, 8, 18, 0])
    np.testing.assert_array_equal(slot[:5], [9, 9, 9, 9, 7])
    expected = [FIRST + FRESH + OPENS, OPENS, OPENS, LAST + OPENS, FIRST + LAST, OPENS]
    np.testing.assert_array_equal(flags[:6], expected)


def test_widths_that_do_not_fill_a_tile_are_refused():
    assert supports(PUBLISHED) and not supports(GatedDeltaNetShape(2, 8, 64, 64))
    with pytest.raises(ValueError, match="128"):
        gated_delta_net(*([None] * 12), shape=GatedDeltaNetShape(2, 8, 64, 64))


def compiled_for_ironwood(shape, tokens, sequences, *, decode, state=jnp.bfloat16, window=None):
    def array(*size, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(size, dtype)

    heads, numbers = (shape.value_heads,), [array(sequences, dtype=jnp.int32)] * 4
    slots = SLOTS
    args = [
        array(tokens, shape.channels, dtype=jnp.bfloat16), array(tokens, *heads), array(tokens, *heads),
        array(4, shape.channels), array(*heads), array(*heads), *numbers,
        array(slots, 3, shape.channels, dtype=jnp.bfloat16), array(slots, *heads, 128, 128, dtype=state),
    ]
    if window:
        args.append(array(sequences, window, dtype=jnp.int32))
    return compile_jax(functools.partial(gated_delta_net, shape=shape, decode=decode), *args, donated=(10, 11))


def check_in_place(compiled, shape, state=jnp.bfloat16):
    """The pools are updated where they are: nothing as large as a state is made beside them."""
    pools = SLOTS * shape.value_heads * 128 * 128 * jnp.dtype(state).itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < pools


@pytest.mark.parametrize("state", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_decode_of_eight_sequences_compiles_for_ironwood(state):
    compiled = compiled_for_ironwood(PUBLISHED, 8, 8, decode=True, state=state)
    text = compiled.as_text()
    assert "gated_delta_net_decode" in text and "gated_delta_net_chunk" not in text
    check_in_place(compiled, PUBLISHED, state)


@pytest.mark.slow
def test_prefill_of_1024_tokens_compiles_for_ironwood():
    compiled = compiled_for_ironwood(PUBLISHED, 1024, 1, decode=False)
    assert "gated_delta_net_decode" in compiled.as_text() and "gated_delta_net_chunk" in compiled.as_text()
    check_in_place(compiled, PUBLISHED)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 8), (2, 6), (2, 2), (16, 48)], ids=lambda heads: f"{heads[0]} for {heads[1]}")
@pytest.mark.parametrize("state", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_other_heads_and_windows_compile_for_ironwood(heads, state):
    compiled_for_ironwood(GatedDeltaNetShape(*heads, 128, 128), 100, 12, decode=False, state=state, window=3)
