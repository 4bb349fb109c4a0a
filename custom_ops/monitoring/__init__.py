"""Statistics of what a layer computes, reduced on the device to a few numbers: what a numerical watch looks at.

Every function sees one device's share (T tokens, S sequences of one data-parallel rank) and returns one row of float32, its
columns named beside it. Reductions over heads cover the heads of all devices.
"""

from custom_ops.monitoring.attention import ATTENTION, attention_statistics
from custom_ops.monitoring.finite import FINITE, finiteness, first_not_finite
from custom_ops.monitoring.gated_delta_net import GATES, STATES, gated_delta_net_statistics
from custom_ops.monitoring.routing import ROUTING, routing_statistics

__all__ = [
    "ATTENTION",
    "FINITE",
    "GATES",
    "ROUTING",
    "STATES",
    "attention_statistics",
    "finiteness",
    "first_not_finite",
    "gated_delta_net_statistics",
    "routing_statistics",
]
