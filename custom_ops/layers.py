"""Operations on one layer's part of arrays that hold all layers', by its number.

The layer's slots and pages are a run of the whole array's, so its states are not taken out of the array and put back: a scan
over layers that did that would copy them twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable


def gated_delta_net(
    function: Callable, qkv, b, a, conv_weight, A_log, dt_bias, query_start, query_length, context_length, slot,
    conv_state, recurrent_state, layer, **static,
):
    """An implementation of `custom_ops.gated_delta_net` on states [layers, N, ...], of which it takes layer `layer`."""
    conv_pool, recurrent_pool = _flat(conv_state), _flat(recurrent_state)
    output, conv_pool, recurrent_pool = function(
        qkv, b, a, conv_weight, A_log, dt_bias, query_start, query_length, context_length,
        slot + layer * conv_state.shape[1], conv_pool, recurrent_pool, **static,
    )  # fmt: skip
    return output, conv_pool.reshape(conv_state.shape), recurrent_pool.reshape(recurrent_state.shape)


def ragged_paged_attention(
    function: Callable, query, key, value, pages, query_start, query_length, context_length, page_table, *scales_and_layer,
    **static,
):
    """An implementation of `custom_ops.ragged_paged_attention` on pages, and their scales where there are any, [layers,
    pages, ...], of which it takes the layer that comes last."""
    *scales, layer = scales_and_layer
    table = page_table + layer * pages.shape[1]
    output, *pools = function(
        query, key, value, _flat(pages), query_start, query_length, context_length, table, *map(_flat, scales), **static
    )
    return output, *(pool.reshape(own.shape) for pool, own in zip(pools, (pages, *scales), strict=True))


def ragged_moe(function: Callable, *arrays, **static):
    """An implementation of `custom_ops.ragged_moe` on stacked weights; the last of `arrays` is the layer."""
    return function(*arrays[:-1], layer=arrays[-1], **static)


@functools.cache
def of_layer(name: str, function: Callable) -> Callable:
    """`function`, an implementation of the operation `name`, with a layer as its last argument."""
    wrappers = {"gated_delta_net": gated_delta_net, "ragged_moe": ragged_moe, "ragged_paged_attention": ragged_paged_attention}
    return functools.partial(wrappers[name], function)


def _flat(states):
    return states.reshape(-1, *states.shape[2:])
