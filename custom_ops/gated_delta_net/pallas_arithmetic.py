"""FP32 arithmetic for the matrix unit, which multiplies in BF16 and adds in FP32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def top_half(x):
    """x without the lower half of its bits: exact in BF16, and what it leaves fits BF16 to 2⁻¹⁶ of x.

    By bits, since compilers may take a conversion to BF16 and back for nothing.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def split(x):
    """x as the sum of two BF16 arrays."""
    top = top_half(x)
    return top.astype(jnp.bfloat16), (x - top).astype(jnp.bfloat16)


def split_exactly(x):
    """x as the sum of three BF16 arrays, all 24 bits of it."""
    top = top_half(x)
    middle = top_half(x - top)
    return tuple(part.astype(jnp.bfloat16) for part in (top, middle, x - top - middle))


def dot(x, y, contract=((1,), (0,))):
    return lax.dot_general(x, y, (contract, ((), ())), preferred_element_type=jnp.float32)


def product(x, y):
    """x @ y of FP32 matrices given as `split` pairs, to 2⁻¹⁶; one product, three times as deep."""
    return dot(jnp.concatenate([*x, x[0]], axis=1), jnp.concatenate([y[0], *y]))


def stacked_product(x, y):
    """The same where x has few rows and y at most 128 columns: fewer weights to load, [y's top | its rest]."""
    rows, columns = x[0].shape[0], y[0].shape[1]
    every = dot(jnp.concatenate(x), jnp.concatenate(y, axis=1))
    return every[:rows, :columns] + (every[:rows, columns:] + every[rows:, :columns])


def softplus(x):
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def one_where(condition):
    return condition.astype(jnp.float32).astype(jnp.bfloat16)


def side_by_side(x, y):
    """The left half of x's lanes and the right half of y's."""
    return jnp.where(iota(x.shape, 1) < x.shape[1] // 2, x, y)


def copy_lane(x, lane):
    """x [rows, 128] with a lane of each row in the place of others: `lane` is one number for all, or one for each element."""
    index = jnp.broadcast_to(jnp.asarray(lane, jnp.int32), x.shape)
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")
