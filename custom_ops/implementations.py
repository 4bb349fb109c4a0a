"""Which implementation of an operation runs where: the one place that decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

from custom_ops.all_gather import pallas_tpu as all_gather_pallas
from custom_ops.all_gather import reference as all_gather_reference
from custom_ops.all_gather import xla as all_gather_xla
from custom_ops.gated_delta_net import pallas_tpu as gated_delta_net_pallas
from custom_ops.gated_delta_net import reference as gated_delta_net_reference
from custom_ops.gated_delta_net import xla as gated_delta_net_xla
from custom_ops.ragged_moe import pallas_plan as ragged_moe_plan
from custom_ops.ragged_moe import pallas_send as ragged_moe_send
from custom_ops.ragged_moe import pallas_tpu as ragged_moe_pallas
from custom_ops.ragged_moe import reference as ragged_moe_reference
from custom_ops.ragged_moe import xla as ragged_moe_xla
from custom_ops.ragged_moe.layer import with_experts, with_packed_experts
from custom_ops.ragged_paged_attention import pallas_layout as attention_layout
from custom_ops.ragged_paged_attention import pallas_tpu as attention_pallas
from custom_ops.ragged_paged_attention import reference as attention_reference
from custom_ops.ragged_paged_attention import xla as attention_xla
from custom_ops.reduce_scatter import pallas_tpu as reduce_scatter_pallas
from custom_ops.reduce_scatter import reference as reduce_scatter_reference
from custom_ops.reduce_scatter import xla as reduce_scatter_xla

IMPLEMENTATIONS: dict[str, dict[str, Callable]] = {
    "all_gather": {
        "reference": all_gather_reference.all_gather,
        "xla": all_gather_xla.all_gather,
        "pallas_tpu": all_gather_pallas.all_gather,
    },
    "gated_delta_net": {
        "reference": gated_delta_net_reference.gated_delta_net,
        "xla": gated_delta_net_xla.gated_delta_net,
        "pallas_tpu": gated_delta_net_pallas.gated_delta_net,
    },
    "ragged_moe": {
        "reference": with_experts(ragged_moe_reference.experts),
        "xla": with_experts(ragged_moe_xla.experts),
        "pallas_tpu": with_packed_experts(ragged_moe_send.send, ragged_moe_pallas.experts_of_packed),
    },
    "ragged_paged_attention": {
        "reference": attention_reference.ragged_paged_attention,
        "xla": attention_xla.ragged_paged_attention,
        "pallas_tpu": attention_pallas.ragged_paged_attention,
    },
    "reduce_scatter": {
        "reference": reduce_scatter_reference.reduce_scatter,
        "xla": reduce_scatter_xla.reduce_scatter,
        "pallas_tpu": reduce_scatter_pallas.reduce_scatter,
    },
}

SUPPORTS: dict[str, dict[str, Callable[..., bool]]] = {
    "all_gather": {"pallas_tpu": all_gather_pallas.supports},
    "gated_delta_net": {"pallas_tpu": gated_delta_net_pallas.supports},
    "ragged_moe": {"pallas_tpu": ragged_moe_plan.supports},
    "ragged_paged_attention": {"pallas_tpu": attention_layout.supports},
    "reduce_scatter": {"pallas_tpu": reduce_scatter_pallas.supports},
}
"""By operation and implementation: whether it takes a shape, for implementations that do not take all."""

SHAPES: dict[str, Callable[..., Hashable]] = {
    "ragged_moe": ragged_moe_plan.ExpertsShape.of_layer,
    "ragged_paged_attention": attention_layout.AttentionShape.of_arguments,
}
"""By operation: the shape of the arguments that it is called with, for operations without a keyword argument `shape`."""

PREFERRED = {"cpu": ("xla",), "tpu": ("pallas_tpu", "xla")}
"""Implementations by platform, the best first; the first that an operation has and that takes its shape runs."""


def supports(op: str, name: str, shape: Hashable) -> bool:
    """Whether an implementation takes arrays of this shape (what `op` describes its sizes with, or None)."""
    predicate = SUPPORTS.get(op, {}).get(name)
    return predicate is None or predicate(shape)


@functools.cache
def implementation(op: str, platform: str, override: str | None = None) -> Callable:
    """The function that computes `op` on `platform` ('cpu' or 'tpu'); `override` names one implementation for it.

    It chooses among the platform's implementations when it is called, by the keyword argument `shape` of operations
    that have one, or what `SHAPES` makes of the arguments. Pallas kernels for TPU run in Pallas' interpreter elsewhere.

    Raises:
        ValueError: no such implementation; on calling: it does not take the shape.
    """
    if override and override not in IMPLEMENTATIONS[op]:
        raise ValueError(f"{op} has no implementation '{override}'; there are: {', '.join(IMPLEMENTATIONS[op])}")
    names = [override] if override else [name for name in PREFERRED[platform] if name in IMPLEMENTATIONS[op]]

    def function(*arrays, **static):
        shape = SHAPES[op](*arrays, **static) if op in SHAPES else static.get("shape")
        for name in names:
            if supports(op, name, shape):
                interpret = {"interpret": True} if name == "pallas_tpu" and platform != "tpu" else {}
                return IMPLEMENTATIONS[op][name](*arrays, **static, **interpret)
        raise ValueError(f"{op}: {' and '.join(names)} does not take {shape}")

    return function
