"""The running softmax of rows of queries over blocks of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from custom_ops.ragged_paged_attention.pages import FP8
from custom_ops.ragged_paged_attention.pallas_stream import Block

MASKED = -1e30
"""Score of an unseen position: finite, so that a block without any seen position leaves no NaN."""


class Running(NamedTuple):
    """Of each row: the highest score, [rows, 1]; the sum of the weights relative to it, [rows, 1]; the values weighted with
    them, [rows, head dim]."""

    highest: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def empty(cls, rows: int, dim: int) -> Running:
        return cls(jnp.full((rows, 1), MASKED), jnp.zeros((rows, 1)), jnp.zeros((rows, dim)))


def scores_of(query, block: Block, head: int):
    """[rows, positions] of queries that are scaled."""
    scores = _product(query, block.rows(2 * head), (1, 1), query.dtype, block.layout.interpret)
    return scores * block.scale(2 * head) if block.layout.scaled else scores


def attend(running: Running, scores, dtype, block: Block, head: int) -> Running:
    """After one more block, whose unseen positions have the score `MASKED`; weights are rounded to `dtype`.

    Scales multiply scores and weights, which are fewer than the elements of keys and values.
    """
    highest = jnp.maximum(running.highest, jnp.max(scores, axis=1, keepdims=True))
    weights, shrink = jnp.exp(scores - highest), jnp.exp(running.highest - highest)
    total = running.total * shrink + jnp.sum(weights, axis=1, keepdims=True)
    if block.layout.scaled:
        weights = weights * block.scale(2 * head + 1)
    update = _product(weights, block.rows(2 * head + 1), (1, 0), dtype, block.layout.interpret)
    return Running(highest, total, running.weighted * shrink + update)


def attend_columns(running: Running, query, seen, block: Block, head: int) -> Running:
    """`attend` for queries that are columns, [head dim, columns], where there are many: maxima and sums over positions then run
    along vectors of queries, and so does what `Running` holds, [1, columns] and [head dim, columns].

    seen: [positions, columns], or None where all are.
    """
    interpret, scaled = block.layout.interpret, block.layout.scaled
    scores = _product(block.rows(2 * head), query, (1, 0), query.dtype, interpret)
    if scaled:
        scores = scores * _column(block.scale(2 * head))
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    highest = jnp.maximum(running.highest, jnp.max(scores, axis=0, keepdims=True))
    weights, shrink = jnp.exp(scores - highest), jnp.exp(running.highest - highest)
    total = running.total * shrink + jnp.sum(weights, axis=0, keepdims=True)
    if scaled:
        weights = weights * _column(block.scale(2 * head + 1))
    values = block.rows(2 * head + 1).astype(query.dtype)  # in FP8 it could not be turned
    update = _product(values, weights, (0, 0), query.dtype, interpret)
    return Running(highest, total, running.weighted * shrink + update)


def _column(row):
    """[1, n] → [n, 1]"""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _product(left, right, contracted: tuple[int, int], dtype, interpret: bool):
    """FP32 product of operands in `dtype`, contracted over one axis of each. The matrix unit multiplies BF16 by FP8 as is."""
    mixed = dtype == jnp.bfloat16 and not interpret
    left, right = (operand if mixed and operand.dtype == FP8 else operand.astype(dtype) for operand in (left, right))
    contract = (tuple((axis,) for axis in contracted), ((), ()))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.dot_general(left, right, contract, precision=precision, preferred_element_type=jnp.float32)
