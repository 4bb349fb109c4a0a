"""What travels to the experts: every number comes back as it was, in every dtype of the wire."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_ops.ragged_moe.wire import Tokens, check_experts, columns, from_wire, pack, to_wire, unpack

WIRES = ["float8_e4m3fn", "int8", "bfloat16", "float16", "float32"]
SCALED = ("float8_e4m3fn", "int8")


def tokens(wire: str, rows: int, hidden: int, top_k: int) -> Tokens:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, hidden)) * np.exp(rng.standard_normal((rows, 1)))
    array, scale = to_wire(jnp.asarray(values, jnp.float32), jnp.dtype(wire))
    expert = rng.integers(0, 1 << 16, (rows, top_k)).astype(np.int32)
    weight = rng.uniform(size=(rows, top_k)).astype(np.float32)
    return Tokens(array, scale, jnp.asarray(expert), jnp.asarray(weight))


def opened(rows, scale):
    """Rows in float32, times their scales."""
    rows, scale = from_wire(rows, scale, jnp.float32)
    rows = rows.astype(jnp.float32)
    return rows if scale is None else rows * scale[:, None]


def same_bits(one, other) -> bool:
    return one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("rows, hidden, top_k", [(8, 256, 10), (1, 32, 1), (5, 100, 7), (3, 700, 2)])
def test_comes_back_as_it_was(wire, rows, hidden, top_k):
    sent = tokens(wire, rows, hidden, top_k)
    packed = jax.jit(pack)(sent)
    assert packed.dtype == wire and packed.shape == (rows, columns(wire, hidden=hidden, top_k=top_k))
    received = jax.jit(lambda packed: unpack(packed, hidden=hidden, top_k=top_k))(packed)
    assert (received.row_scale is None) == (wire not in SCALED)
    received = received._replace(rows=received.rows[:, :hidden])
    for one, other in zip(sent, received, strict=True):
        assert one is None or same_bits(one, other)


@pytest.mark.parametrize("wire", WIRES)
def test_numbers_that_are_not_finite_travel_too(wire):
    sent = tokens(wire, 4, 32, 3)
    weight = sent.weight.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf).at[2, 2].set(-0.0).at[3, 0].set(1e-30)
    changed = {"row_scale": sent.row_scale.at[3].set(jnp.nan)} if wire == "int8" else {"rows": sent.rows.at[3, 5].set(jnp.nan)}
    sent = sent._replace(weight=weight, **changed)
    received = unpack(pack(sent), hidden=32, top_k=3)
    np.testing.assert_array_equal(received.weight, weight)
    np.testing.assert_array_equal(received.expert, sent.expert)
    values = [np.asarray(opened(part.rows[:, :32], part.row_scale)) for part in (received, sent)]
    np.testing.assert_array_equal(*map(np.isnan, values))
    assert np.isnan(values[0][3]).any() and np.isfinite(values[0][:3]).all()


@pytest.mark.parametrize(
    "wire, expected",
    [
        ("float8_e4m3fn", 4096 + 8 * (1 + 10 + 5)),  # four bits a byte: eight digits for the scale, a weight, two experts
        ("int8", 4096 + 4 * (10 + 5 + 16)),  # whole bytes: a weight, two experts, the scales of two of 32 blocks
        ("bfloat16", 2 * (4096 + 4 * (10 + 5))),
        ("float32", 4 * (4096 + 2 * (10 + 5))),
    ],
)
def test_bytes_of_a_token_of_397b(wire, expected):
    assert columns(wire, hidden=4096, top_k=10) * jnp.dtype(wire).itemsize == expected


def test_fp8_rows_are_within_half_a_step():
    """Three bits of mantissa: half a step is 1/16 of a normal number, and 2⁻¹⁰ of the scale of what is smaller."""
    rng = np.random.default_rng(0)
    hidden = (rng.standard_normal((64, 256)) * np.exp(rng.standard_normal((64, 1)) * 10)).astype(np.float32)
    rows, scale = to_wire(jnp.asarray(hidden), jnp.dtype("float8_e4m3fn"))
    back = np.asarray(rows.astype(jnp.float32)) * np.asarray(scale)[:, None]
    assert (np.abs(back - hidden) <= np.maximum(np.abs(hidden) / 16, np.asarray(scale)[:, None] * 2**-10) * 1.001).all()


def test_int8_rows_are_within_half_a_step_of_their_block():
    """The step is the block's largest value over 127, rounded up to a number of BF16 (by one part in 128 at most)."""
    rng = np.random.default_rng(0)
    hidden = (rng.standard_normal((64, 300)) * np.exp(rng.standard_normal((64, 300)) * 5)).astype(np.float32)
    rows, scale = to_wire(jnp.asarray(hidden), jnp.dtype("int8"))
    assert scale.shape == (64, 3) and np.abs(np.asarray(rows, np.int32)).max() == 127
    np.testing.assert_array_equal(scale, scale.astype(jnp.bfloat16).astype(jnp.float32))
    error = np.abs(opened(rows, scale) - hidden)
    for number, first in enumerate((0, 128, 256)):
        block = slice(first, first + 128)
        step = np.abs(hidden[:, block]).max(1) / 127
        assert (np.asarray(scale)[:, number] <= step * (1 + 2**-7)).all()
        assert (error[:, block] <= step[:, None] * (0.5 * (1 + 2**-7) + 1e-4)).all()


def test_int8_rows_have_a_quarter_of_the_error_of_fp8_rows():
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((64, 4096)), jnp.float32)
    int8, fp8 = (np.std(opened(*to_wire(hidden, jnp.dtype(wire))) - hidden) for wire in ("int8", "float8_e4m3fn"))
    assert int8 <= 0.26 * fp8


def test_int8_codes_between_two_are_even():
    hidden = jnp.asarray([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0]], jnp.float32)
    rows, scale = to_wire(hidden, jnp.dtype("int8"))
    np.testing.assert_array_equal(rows, [[127, 0, 2, 2, 0, -2, -2, 0]])
    assert scale == 1


@pytest.mark.parametrize("wire", SCALED)
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e38])
def test_scaled_rows_of_any_size_are_numbers(wire, value):
    back = opened(*to_wire(jnp.full((1, 16), value, jnp.float32), jnp.dtype(wire)))
    assert np.isfinite(back).all() and np.abs(np.asarray(back) - value).max() <= max(value / 16, 1e-38)


@pytest.mark.parametrize("wire", SCALED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scaled_row_with_a_value_that_is_not_finite_has_no_finite_product(wire, value):
    product = opened(*to_wire(jnp.ones((2, 200), jnp.float32).at[0, 3].set(value), jnp.dtype(wire))).sum(axis=1)
    assert np.isnan(product[0]) and np.isfinite(product[1])


def test_more_experts_than_the_columns_hold():
    check_experts(65535)
    with pytest.raises(ValueError, match="65536 experts"):
        check_experts(65536)
