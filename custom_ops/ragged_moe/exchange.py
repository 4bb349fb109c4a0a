"""Tokens to all devices and results back to their owners: the only communication of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.all_gather import AllGatherShape
from custom_ops.ragged_moe.wire import Tokens, pack, unpack
from custom_ops.reduce_scatter import ReduceScatterShape


def dispatch(
    tokens: Tokens | jax.Array, token_axes: tuple[str, ...], expert_axes: tuple[str, ...], all_gather: Callable
) -> Tokens | jax.Array:
    """Tokens of all devices, in the order of the devices, by one all-gather: packed, for `arrived` to take apart. Without token
    axes they are whole already.

    all_gather: see `custom_ops.all_gather`; it gathers from all devices that share the experts. Where several of them own the
        same tokens, each sends a part of the rows.
    """
    if not token_axes:
        return tokens
    packed = pack(tokens) if isinstance(tokens, Tokens) else tokens
    sharing, axes = _sharing(token_axes, expert_axes), token_axes
    if sharing and packed.shape[0] % lax.axis_size(sharing) == 0:
        rows = packed.shape[0] // lax.axis_size(sharing)
        packed, axes = lax.dynamic_slice_in_dim(packed, lax.axis_index(sharing) * rows, rows), (*token_axes, *sharing)
    return all_gather(packed, shape=AllGatherShape.of(packed, axes), axes=axes)


def arrived(dispatched: Tokens | jax.Array, *, hidden: int, top_k: int) -> Tokens:
    """What was dispatched, as tokens. Rows that have travelled have more columns than before: what travelled with them."""
    return dispatched if isinstance(dispatched, Tokens) else unpack(dispatched, hidden=hidden, top_k=top_k)


def combine(partial, token_axes: tuple[str, ...], expert_axes: tuple[str, ...], reduce_scatter: Callable):
    """Sum of every device's `partial` results [all tokens, hidden size], each device keeping its own rows.

    reduce_scatter: see `custom_ops.reduce_scatter`; it sums over all devices that share the experts. Where several of them
        own the same tokens, each gets a part of the rows and they then gather them from each other.
    """
    if not expert_axes:
        return partial
    if not token_axes:
        return lax.psum(partial, expert_axes)
    sharing = _sharing(token_axes, expert_axes)
    if partial.shape[0] % lax.axis_size(expert_axes):  # fewer rows than devices
        return lax.psum_scatter(lax.psum(partial, sharing), token_axes, scatter_dimension=0, tiled=True)
    summed = reduce_scatter(partial, shape=ReduceScatterShape.of(partial, expert_axes), axes=expert_axes)
    return lax.all_gather(summed, sharing, axis=0, tiled=True) if sharing else summed


def _sharing(token_axes: tuple[str, ...], expert_axes: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes of devices that own the same tokens."""
    return tuple(axis for axis in expert_axes if axis not in token_axes)


def first_local_expert(local_experts: int, expert_axes: tuple[str, ...]):
    """Number of this device's first expert."""
    return lax.axis_index(expert_axes) * local_experts if expert_axes else jnp.int32(0)
