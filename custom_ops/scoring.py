"""Scores of given tokens under a language-model head, without ever holding the logits of all rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SCORES = ("logprob", "rank", "entropy")
"""The first columns of a result; those of `top_k` alternatives follow, ids before log-probabilities."""
_LOGITS = 1 << 25
"""Most logits that are held at once: 128 MiB in FP32."""


def target_scores(hidden, head, target, *, top_k: int, tied: bool):
    """How likely each row's target is.

    Args:
        hidden: [rows, hidden size]
        head: [hidden size, vocabulary], or the embedding [vocabulary, hidden size] with `tied`.
        target: [rows] int32, the token that is scored.
        top_k: number of most likely tokens to return beside it.

    Returns: [rows, 3 + 2 * top_k] float32: log-probability of the target in nats; its rank (0 for the most likely token,
        of equally likely ones the lowest id first); entropy of the distribution in nats; ids and log-probabilities of the
        most likely tokens. Logits and log-softmax are FP32.
    """
    vocabulary = head.shape[0 if tied else 1]
    rows = hidden.shape[0]
    size = min(rows, max(1 << (_LOGITS // vocabulary).bit_length() - 1, 8))
    count = -(-rows // size)

    def chunk(operands):
        part, wanted = operands
        contracted = (((1,), (1 if tied else 0,)), ((), ()))
        logits = lax.dot_general(part, head.astype(part.dtype), contracted, preferred_element_type=jnp.float32)
        log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        own = jnp.take_along_axis(logits, wanted[:, None], axis=-1)
        before = jnp.arange(vocabulary) < wanted[:, None]
        rank = jnp.sum((logits > own) | ((logits == own) & before), axis=-1, keepdims=True, dtype=jnp.int32)
        entropy = log_sum - jnp.sum(jnp.exp(logits - log_sum) * logits, axis=-1, keepdims=True)
        columns = [own - log_sum, rank, entropy]
        if top_k:
            best, token = lax.top_k(logits, top_k)
            columns += [token, best - log_sum]
        return jnp.concatenate([column.astype(jnp.float32) for column in columns], axis=-1)

    padded = count * size - rows
    hidden = jnp.pad(hidden, ((0, padded), (0, 0))).reshape(count, size, -1)
    target = jnp.pad(target, (0, padded)).reshape(count, size)
    return lax.map(chunk, (hidden, target)).reshape(count * size, -1)[:rows]
