"""Which implementation of an operation runs where: the one place that decides."""

from __future__ import annotations

from collections.abc import Callable

from custom_ops.gated_delta_net import reference as gated_delta_net_reference
from custom_ops.gated_delta_net import xla as gated_delta_net_xla
from custom_ops.ragged_moe import reference as ragged_moe_reference
from custom_ops.ragged_moe import xla as ragged_moe_xla
from custom_ops.ragged_paged_attention import reference as attention_reference
from custom_ops.ragged_paged_attention import xla as attention_xla

IMPLEMENTATIONS: dict[str, dict[str, Callable]] = {
    "gated_delta_net": {
        "reference": gated_delta_net_reference.gated_delta_net,
        "xla": gated_delta_net_xla.gated_delta_net,
    },
    "ragged_moe": {
        "reference": ragged_moe_reference.ragged_moe,
        "xla": ragged_moe_xla.ragged_moe,
    },
    "ragged_paged_attention": {
        "reference": attention_reference.ragged_paged_attention,
        "xla": attention_xla.ragged_paged_attention,
    },
}

DEFAULT = {"cpu": "xla", "tpu": "xla"}
"""Implementation by platform."""


def implementation(op: str, platform: str, override: str | None = None) -> Callable:
    """The function that computes `op` on `platform` ('cpu' or 'tpu'); `override` names another implementation.

    Raises:
        ValueError: no such implementation.
    """
    name = override or DEFAULT[platform]
    if name not in IMPLEMENTATIONS[op]:
        raise ValueError(f"{op} has no implementation '{name}'; there are: {', '.join(IMPLEMENTATIONS[op])}")
    return IMPLEMENTATIONS[op][name]
