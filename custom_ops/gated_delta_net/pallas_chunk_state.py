"""The chunk kernel's stages around the running state: reading it, new values, outputs, its update.

With `total` as g summed up to a row, a chunk's new values are U = (1 + lower)⁻¹ beta (V - exp(total) K S), its outputs
exp(total) Q S + attend U, and the state after it is exp(total of the last row) S + (damped K)ᵀ U; see `xla`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from custom_ops.gated_delta_net.pallas_arithmetic import copy_lane, dot, product, split
from custom_ops.gated_delta_net.pallas_chunk_memory import Chunk
from custom_ops.gated_delta_net.tiling import CHUNK, LANES


def read_state(chunk: Chunk, head) -> None:
    """K S and Q S of a key head's group, one product: V - exp(total) K S into `change`, exp(total) Q S into `read`."""
    scratch, group = chunk.scratch, chunk.shape.group
    heads = range(group)
    states = jnp.concatenate([scratch.state[head * group + n] for n in heads], axis=1)
    both = product((scratch.keys[head, 0], scratch.keys[head, 1]), split(states))
    for n in heads:
        h, lanes = head * group + n, slice(n * LANES, (n + 1) * LANES)
        growth = copy_lane(scratch.growth[...], h)
        scratch.change[h] = scratch.values[h] - growth * both[:CHUNK, lanes]
        scratch.read[h] = growth * both[CHUNK:, lanes]


def solve(chunk: Chunk, p) -> None:
    """The new values of a pair, in place of `change`, and as they count at the chunk's end."""
    scratch = chunk.scratch
    inverse = split(scratch.inverse[p] * scratch.beta_row[pl.ds(p, 1)])
    new = product(inverse, _values_of_pair(chunk, p))
    for n in range(2):
        h, values = 2 * p + n, new[:, n * LANES : (n + 1) * LANES]
        scratch.change[h] = values
        scratch.damped[h] = values * copy_lane(scratch.damping[...], h)


def write_output(chunk: Chunk, valid, p) -> None:
    """The outputs of a pair; rows of other sequences stay, or are cleared by the block's first chunk."""
    scratch, out = chunk.scratch, chunk.operands.out
    new = product((scratch.attend[p, 0], scratch.attend[p, 1]), _values_of_pair(chunk, p))
    new += jnp.concatenate([scratch.read[2 * p], scratch.read[2 * p + 1]], axis=1)
    lanes = pl.ds(pl.multiple_of(2 * p * LANES, 2 * LANES), 2 * LANES)
    before = jnp.where(chunk.opens, jnp.zeros_like(new), out[:, lanes].astype(jnp.float32))
    out[:, lanes] = jnp.where(jnp.concatenate([valid, valid], axis=1), new, before).astype(out.dtype)


def _values_of_pair(chunk: Chunk, p):
    """Two BF16 parts of a pair's `change` as block diagonal matrices [128, 256]."""
    first, second = (split(chunk.scratch.change[2 * p + n]) for n in range(2))
    return tuple(map(_block_diagonal, first, second))


def _block_diagonal(x, y):
    zero = jnp.zeros_like(x)
    return jnp.concatenate([jnp.concatenate([x, zero], axis=1), jnp.concatenate([zero, y], axis=1)])


def update_state(chunk: Chunk, head) -> None:
    """The running states of a key head's group after the chunk."""
    scratch, group = chunk.scratch, chunk.shape.group
    top, rest = scratch.keys[head, 0, :CHUNK], scratch.keys[head, 1, :CHUNK]
    damped, growth = [], []
    for n in range(group):
        h = head * group + n
        damped.append(scratch.damped[h])
        growth.append(copy_lane(scratch.growth[CHUNK - 8 :], h)[7:])
    values = split(jnp.concatenate(damped, axis=1))
    keys, values = jnp.concatenate([top, top, rest]), jnp.concatenate([*values, values[0]])
    added = dot(keys, values, ((0,), (0,)))
    for n in range(group):
        h = head * group + n
        scratch.state[h] = scratch.state[h] * growth[n] + added[:, n * LANES : (n + 1) * LANES]
