"""The door between modules and `custom_ops`: which implementation runs, and how its arrays lie on the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from custom_ops import monitoring, sampling, scoring
from custom_ops.bridge import JaxOp, current_platform
from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.implementations import implementation
from custom_ops.ragged_moe.routing import route
from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.parallel.mesh import Axes, DeviceMesh

# Logical axes of arrays. A sequence, a slot and a page belong to one data-parallel rank, as tokens do.
ROWS = ("tokens",)
ROWS_DIM = ("tokens", None)
HEADS = ("heads",)
ROWS_HEADS = ("tokens", "heads")
ROWS_HEADS_DIM = ("tokens", "heads", None)
CONV_STATE = ("tokens", None, "heads")
RECURRENT_STATE = ("tokens", "heads", None, None)
PAGES = ("tokens", None, "heads", None)
EXPERTS = ("experts", None, None)


def gated_delta_net_shape(config) -> GatedDeltaNetShape:
    """Heads of a whole Gated DeltaNet layer."""
    return GatedDeltaNetShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


class Operations:
    """The operations of the model for one mesh and one `RuntimeConfig`. Tensors are global; each device sees its share."""

    def __init__(self, mesh: DeviceMesh, runtime: RuntimeConfig):
        self.mesh = mesh
        self.round_router = runtime.round_router
        self._functions: dict[str, Callable] = {
            name: implementation(name, current_platform(), runtime.implementations.get(name))
            for name in ("gated_delta_net", "ragged_moe", "ragged_paged_attention")
        }

    def _op(self, name: str, function: Callable, inputs: tuple[Axes, ...], outputs: tuple[Axes, ...], **static) -> JaxOp:
        specs = [tuple(self.mesh.spec(axes) for axes in group) for group in (inputs, outputs)]
        out_specs = specs[1] if len(outputs) > 1 else specs[1][0]
        return JaxOp(name, function, tuple(static.items()), self.mesh.abstract, specs[0], out_specs)

    def gated_delta_net(
        self, qkv, b, a, conv_weight, A_log, dt_bias, batch: RaggedBatch, conv_state, recurrent_state, *, shape
    ):
        """See `custom_ops.gated_delta_net`; `shape` has the heads of the whole layer."""
        shards = self.mesh.shards("heads")
        local = dataclasses.replace(shape, key_heads=shape.key_heads // shards, value_heads=shape.value_heads // shards)
        op = self._op(
            "gated_delta_net",
            self._functions["gated_delta_net"],
            (
                ROWS_HEADS, ROWS_HEADS, ROWS_HEADS, (None, "heads"), HEADS, HEADS,
                ROWS, ROWS, ROWS, ROWS, CONV_STATE, RECURRENT_STATE,
            ),
            (ROWS_HEADS_DIM, CONV_STATE, RECURRENT_STATE),
            shape=local,
            decode=batch.decode,
        )
        return op(
            qkv, b, a, conv_weight, A_log, dt_bias,
            batch.query_start, batch.query_length, batch.context_length, batch.slot, conv_state, recurrent_state,
        )  # fmt: skip

    def attention(self, query, key, value, pages, batch: RaggedBatch, *, scale: float):
        """See `custom_ops.ragged_paged_attention`."""
        op = self._op(
            "ragged_paged_attention",
            self._functions["ragged_paged_attention"],
            (ROWS_HEADS_DIM, ROWS_HEADS_DIM, ROWS_HEADS_DIM, PAGES, ROWS, ROWS, ROWS, ROWS_DIM),
            (ROWS_HEADS_DIM, PAGES),
            scale=scale,
            decode=batch.decode,
        )
        return op(
            query, key, value, pages, batch.query_start, batch.query_length, batch.context_length, batch.page_table
        )

    def experts(self, hidden, router_logits, valid, gate_up, down, *, top_k: int) -> torch.Tensor:
        """See `custom_ops.ragged_moe`."""
        op = self._op(
            "ragged_moe",
            self._functions["ragged_moe"],
            (ROWS_DIM, ROWS_DIM, ROWS, EXPERTS, EXPERTS),
            (ROWS_DIM,),
            top_k=top_k,
            token_axes=self.mesh.axes("tokens"),
            expert_axes=self.mesh.axes("experts"),
            round_weights=self.round_router,
        )
        return op(hidden, router_logits, valid, gate_up, down)[0]

    def route(self, router_logits, valid, *, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `custom_ops.ragged_moe.routing.route`."""
        return self._op("route", route, (ROWS_DIM, ROWS), (ROWS_DIM, ROWS_DIM), top_k=top_k)(router_logits, valid)

    def select(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """rows [R*T, ...] at index [R*N], which counts within a rank → [R*N, ...]."""
        axes = ("tokens",) + (None,) * (rows.dim() - 1)
        return self._op("select_rows", _select, (axes, ROWS), (axes,))(rows, index)[0]

    def sample(self, logits: torch.Tensor, seed, step, temperature, top_k, top_p, min_p, *, candidates: int) -> torch.Tensor:
        """See `custom_ops.sampling.sample`."""
        op = self._op(
            "sample", sampling.sample, (ROWS_DIM, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS), (ROWS,), candidates=candidates
        )
        return op(logits, seed, step, temperature, top_k, top_p, min_p)[0]

    def target_scores(self, hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor, *, tied: bool, top_k: int):
        """See `custom_ops.scoring.target_scores`."""
        op = self._op(
            "target_scores", scoring.target_scores, (ROWS_DIM, (None, None), ROWS), (ROWS_DIM,), tied=tied, top_k=top_k
        )
        return op(hidden, head, target)[0]

    def finiteness(self, mixed: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """See `custom_ops.monitoring.finiteness`."""
        return self._op("finiteness", monitoring.finiteness, (ROWS_DIM, ROWS_DIM), (ROWS,))(mixed, output)[0]

    def first_not_finite(self, codes: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """See `custom_ops.monitoring.first_not_finite`; [ranks, 4 * layers]."""
        op = self._op("first_not_finite", monitoring.first_not_finite, ((None, "tokens"), ROWS), (ROWS_DIM,))
        return op(codes, batch.valid)[0]

    def attention_statistics(self, query, key, pages, batch: RaggedBatch) -> torch.Tensor:
        """See `custom_ops.monitoring.attention_statistics`; [ranks, columns]."""
        op = self._op(
            "attention_statistics",
            monitoring.attention_statistics,
            (ROWS_HEADS_DIM, ROWS_HEADS_DIM, PAGES, ROWS, ROWS, ROWS, ROWS, ROWS_DIM),
            (ROWS_DIM,),
            scale=query.shape[-1] ** -0.5,
            head_axes=self.mesh.axes("heads"),
        )
        sequences = (batch.query_start, batch.query_length, batch.context_length, batch.page_table)
        return op(query, key, pages, batch.valid, *sequences)[0]

    def gated_delta_net_statistics(self, b, a, A_log, dt_bias, state, batch: RaggedBatch) -> torch.Tensor:
        """See `custom_ops.monitoring.gated_delta_net_statistics`; [ranks, columns]."""
        op = self._op(
            "gated_delta_net_statistics",
            monitoring.gated_delta_net_statistics,
            (ROWS_HEADS, ROWS_HEADS, HEADS, HEADS, RECURRENT_STATE, ROWS, ROWS, ROWS, ROWS),
            (ROWS_DIM,),
            head_axes=self.mesh.axes("heads"),
        )
        return op(b, a, A_log, dt_bias, state, batch.valid, batch.query_length, batch.context_length, batch.slot)[0]

    def routing_statistics(self, rows, router_logits, batch: RaggedBatch, finiteness, *, top_k: int) -> torch.Tensor:
        """See `custom_ops.monitoring.routing_statistics`; [ranks, columns]."""
        axes = (ROWS_DIM, ROWS_DIM, ROWS, ROWS)
        op = self._op("routing_statistics", monitoring.routing_statistics, axes, (ROWS_DIM,), top_k=top_k)
        return op(rows, router_logits, batch.valid, finiteness)[0]


def _select(rows, index):
    return rows[index]
