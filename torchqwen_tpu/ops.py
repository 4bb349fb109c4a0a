"""The door between modules and `custom_ops`: which implementation runs, and how its arrays lie on the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import torch
from jax import lax

from custom_ops import monitoring, sampling, scoring
from custom_ops.bridge import JaxOp, current_platform
from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.implementations import implementation
from custom_ops.layers import of_layer
from custom_ops.ragged_moe.routing import route
from custom_ops.ragged_moe.wire import FOR_FP8_WEIGHTS
from torchqwen_tpu.batch import RaggedBatch
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.parallel.mesh import Axes, DeviceMesh
from torchqwen_tpu.runtime.graph import barrier

# Logical axes of arrays. A sequence, a slot and a page belong to one data-parallel rank, as tokens do.
ROWS = ("tokens",)
ROWS_DIM = ("tokens", None)
HEADS = ("heads",)
ROWS_HEADS = ("tokens", "heads")
ROWS_HEADS_DIM = ("tokens", "heads", None)
# States of all layers of a kind, layer by layer.
CONV_STATE = (None, "tokens", None, "heads")
RECURRENT_STATE = (None, "tokens", "heads", None, None)
PAGES = (None, "pages", "heads", None, None)
PAGE_SCALE = (None, "pages", "heads", None)
PAGED = (PAGES, PAGE_SCALE)
"""What a sequence has by page; other states it has in a slot."""


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
        self._moe_wire, self._moe_micro_batches = runtime.moe_wire, runtime.moe_micro_batches
        self._functions: dict[str, Callable] = {
            name: implementation(name, current_platform(), runtime.implementations.get(name))
            for name in ("all_gather", "gated_delta_net", "ragged_moe", "ragged_paged_attention", "reduce_scatter")
        }

    def _op(self, name: str, function: Callable, inputs: tuple[Axes, ...], outputs: tuple[Axes, ...], **static) -> JaxOp:
        specs = [tuple(self.mesh.spec(axes) for axes in group) for group in (inputs, outputs)]
        out_specs = specs[1] if len(outputs) > 1 else specs[1][0]
        return JaxOp(name, function, tuple(static.items()), self.mesh.abstract, specs[0], out_specs)

    def gated_delta_net(
        self, qkv, b, a, conv_weight, A_log, dt_bias, batch: RaggedBatch, conv_state, recurrent_state, layer, *, shape
    ):
        """See `custom_ops.gated_delta_net`; the states are those of all layers and this is number `layer`, [] int32; `shape`
        has the heads of the whole layer."""
        shards = self.mesh.shards("heads")
        local = dataclasses.replace(shape, key_heads=shape.key_heads // shards, value_heads=shape.value_heads // shards)
        op = self._op(
            "gated_delta_net",
            of_layer("gated_delta_net", self._functions["gated_delta_net"]),
            (
                ROWS_HEADS, ROWS_HEADS, ROWS_HEADS, (None, "heads"), HEADS, HEADS,
                ROWS, ROWS, ROWS, ROWS, CONV_STATE, RECURRENT_STATE, (),
            ),
            (ROWS_HEADS_DIM, CONV_STATE, RECURRENT_STATE),
            shape=local,
            decode=batch.decode,
        )
        return op(
            qkv, b, a, conv_weight, A_log, dt_bias,
            batch.query_start, batch.query_length, batch.context_length, batch.slot, conv_state, recurrent_state, layer,
        )  # fmt: skip

    def attention(self, query, key, value, paged, layer, batch: RaggedBatch, *, scale: float):
        """See `custom_ops.ragged_paged_attention`; `paged` are the pages of all layers, and their scales if they have any, and
        this is number `layer`, [] int32."""
        pages, *scales = paged
        op = self._op(
            "ragged_paged_attention",
            of_layer("ragged_paged_attention", self._functions["ragged_paged_attention"]),
            (*[ROWS_HEADS_DIM] * 3, PAGES, ROWS, ROWS, ROWS, ROWS_DIM, *[PAGE_SCALE] * len(scales), ()),
            (ROWS_HEADS_DIM, *PAGED[: len(paged)]),
            scale=scale,
            decode=batch.decode,
        )
        return op(
            query, key, value, pages,
            batch.query_start, batch.query_length, batch.context_length, batch.page_table, *scales, layer,
        )  # fmt: skip

    def experts(
        self, hidden, router_logits, valid, gate_up, down, layer=None, *, top_k: int, gate_up_scale=None, down_scale=None
    ) -> torch.Tensor:
        """See `custom_ops.ragged_moe`; with `layer`, [] int32, weights and scales are stacks and this is its number in them."""
        weights = (gate_up, down) if gate_up_scale is None else (gate_up, down, gate_up_scale, down_scale)
        function, stack, stacked = self._functions["ragged_moe"], (), ()
        if layer is not None:
            function, stack, stacked = of_layer("ragged_moe", function), (None,), (layer,)
        axes = ((*stack, "experts") + (None,) * (weight.dim() - len(stack) - 1) for weight in weights)
        op = self._op(
            "ragged_moe",
            function,
            (ROWS_DIM, ROWS_DIM, ROWS, *axes, *(() for _ in stacked)),
            (ROWS_DIM,),
            top_k=top_k,
            token_axes=self.mesh.axes("tokens"),
            expert_axes=self.mesh.axes("experts"),
            round_weights=self.round_router,
            **self._exchange(hidden, gate_up.dtype),
        )
        return op(hidden, router_logits, valid, *weights, *stacked)[0]

    def _exchange(self, hidden: torch.Tensor, weights: torch.dtype) -> dict:
        """How rows go to the experts and back: on a TPU in as few bytes as the weights' precision allows, and no faster
        than exactly elsewhere."""
        small = current_platform() == "tpu" and hidden.dtype == torch.bfloat16
        micro_batches = None if current_platform() == "tpu" else 1
        if self._moe_micro_batches:
            tokens = hidden.shape[0] // self.mesh.ranks
            micro_batches = next(count for count in range(self._moe_micro_batches, 0, -1) if tokens % count == 0)
        return {
            "wire": self._moe_wire or (FOR_FP8_WEIGHTS.name if small and weights == torch.float8_e4m3fn else None),
            "sum_dtype": "bfloat16" if small else "float32",
            "micro_batches": micro_batches,
            "all_gather": self._functions["all_gather"],
            "reduce_scatter": self._functions["reduce_scatter"],
        }

    def route(self, router_logits, valid, *, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `custom_ops.ragged_moe.routing.route`."""
        return self._op("route", route, (ROWS_DIM, ROWS), (ROWS_DIM, ROWS_DIM), top_k=top_k)(router_logits, valid)

    def select(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """rows [R*T, ...] at index [R*N], which counts within a rank → [R*N, ...]."""
        axes = ("tokens",) + (None,) * (rows.dim() - 1)
        return self._op("select_rows", _select, (axes, ROWS), (axes,))(rows, index)[0]

    def copy_states(self, target: torch.Tensor, origin: torch.Tensor, to: torch.Tensor, start: torch.Tensor, axes: Axes):
        """`target` with state to[i] of every rank replaced by state start[i] of `origin`, i of [R*N], one after the other; the
        first -1 ends the list of a rank.

        origin: may be `target`: a place that was written may be read again.
        axes: logical axes of both; states are numbered along "tokens".
        """
        states = (target,) if origin is target else (target, origin)
        op = self._op(
            "copy_states", _copy_states, (*[axes] * len(states), ROWS, ROWS), (axes,), dimension=axes.index("tokens")
        )
        return op(*states, to, start)[0]

    def sample(self, logits: torch.Tensor, seed, step, temperature, top_k, top_p, min_p, *, candidates: int) -> torch.Tensor:
        """See `custom_ops.sampling.sample`."""
        op = self._op(
            "sample", sampling.sample, (ROWS_DIM, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS), (ROWS,), candidates=candidates
        )
        return op(logits, seed, step, temperature, top_k, top_p, min_p)[0]

    def penalize(self, logits: torch.Tensor, seen, penalty, least, generated, eos) -> torch.Tensor:
        """See `custom_ops.sampling.penalize`."""
        op = self._op("penalize", sampling.penalize, (ROWS_DIM, ROWS_DIM, ROWS, ROWS, ROWS, ROWS_DIM), (ROWS_DIM,))
        return op(logits, seen, penalty, least, generated, eos)[0]

    def mark(self, seen: torch.Tensor, token: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See `custom_ops.sampling.mark`."""
        return self._op("mark", sampling.mark, (ROWS_DIM, ROWS, ROWS), (ROWS_DIM,))(seen, token, chosen)[0]

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

    def attention_statistics(self, query, key, paged, layer, batch: RaggedBatch) -> torch.Tensor:
        """See `custom_ops.monitoring.attention_statistics`; `paged` as for `attention`; [ranks, columns]."""
        pages, *scales = paged
        op = self._op(
            "attention_statistics",
            monitoring.attention_statistics,
            (ROWS_HEADS_DIM, ROWS_HEADS_DIM, PAGES, *[ROWS] * 4, ROWS_DIM, *[PAGE_SCALE] * len(scales), ()),
            (ROWS_DIM,),
            scale=query.shape[-1] ** -0.5,
            head_axes=self.mesh.axes("heads"),
        )
        sequences = (batch.query_start, batch.query_length, batch.context_length, batch.page_table)
        return op(query, key, pages, batch.valid, *sequences, *scales, layer)[0]

    def gated_delta_net_statistics(self, b, a, A_log, dt_bias, state, layer, batch: RaggedBatch) -> torch.Tensor:
        """See `custom_ops.monitoring.gated_delta_net_statistics`; [ranks, columns]."""
        op = self._op(
            "gated_delta_net_statistics",
            monitoring.gated_delta_net_statistics,
            (ROWS_HEADS, ROWS_HEADS, HEADS, HEADS, RECURRENT_STATE, ROWS, ROWS, ROWS, ROWS, ()),
            (ROWS_DIM,),
            head_axes=self.mesh.axes("heads"),
        )
        sequences = (batch.query_length, batch.context_length, batch.slot)
        return op(b, a, A_log, dt_bias, state, batch.valid, *sequences, layer)[0]

    def routing_statistics(self, rows, router_logits, batch: RaggedBatch, finiteness, *, top_k: int) -> torch.Tensor:
        """See `custom_ops.monitoring.routing_statistics`; [ranks, columns]."""
        axes = (ROWS_DIM, ROWS_DIM, ROWS, ROWS)
        op = self._op("routing_statistics", monitoring.routing_statistics, axes, (ROWS_DIM,), top_k=top_k)
        return op(rows, router_logits, batch.valid, finiteness)[0]

    def read_before_writes(self, result: torch.Tensor, states: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Have the layers that follow one with `output` [tokens, hidden size] write to `states` only when `result`
        [ranks, columns] has been computed of them; values stay as they are.

        Otherwise XLA may put the next layer's write in place before the read, and then keeps a copy of the states of all
        layers.
        """
        if current_platform() == "tpu":
            barrier(result, *states)
        else:  # XLA:CPU drops barriers before it looks where it needs copies
            after = self._op("after", _after, (ROWS_DIM, ROWS_DIM), (ROWS_DIM,))
            output.copy_(after(output, result)[0])


def _after(rows, result):
    """The rows, which XLA takes to depend on a result: it does not see that this condition never holds."""
    never = (lax.bitcast_convert_type(result[0, 0], jnp.uint32) | 1) == 0
    return jnp.where(never, 0, rows)


def _select(rows, index):
    return rows[index]


def _copy_states(target, *others, dimension):
    """A loop over what there is to copy: the work follows that and not the size of the pool."""
    *origin, to, start = others

    def copy(number, target):
        state = lax.dynamic_slice_in_dim(origin[0] if origin else target, start[number], 1, dimension)
        return lax.dynamic_update_slice_in_dim(target, state, to[number], dimension)

    return lax.fori_loop(0, jnp.sum(to >= 0), copy, target)
