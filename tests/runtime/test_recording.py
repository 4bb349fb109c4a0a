"""Recorders: values from inside the layers beside a step's result, and nothing at all without them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support import dense_config, padded, random_rows, save_random

import torchqwen_tpu
from torchqwen_tpu.inputs import columns_of
from torchqwen_tpu.recording import Routing
from torchqwen_tpu.runtime.graph import compilations
from torchqwen_tpu.runtime.packing import extend

ROWS = random_rows((9, 4, 17), seed=50)
TOP_K = 3


def routed(model, rows, recorders, wanted=slice(None)) -> list[dict[str, np.ndarray]]:
    """Per sequence its records [layers, wanted tokens, ...], from one extend of a batch."""
    batch = padded(rows)
    ids = batch["input_ids"].numpy()
    cache = model.new_cache(len(rows), max(map(len, rows)))
    columns = columns_of(ids, ids.shape, batch["attention_mask"], None, cache, 256)
    for row in columns.rows:
        row.wanted = np.arange(len(row.tokens))[wanted]
    selected = extend(model.steps, cache, columns.rows, recorders=recorders)
    joined = {
        name: np.concatenate([model.mesh.get(step[name]).numpy() for step in selected.records], axis=1)
        for name in selected.records[0]
    }
    return [{name: values[:, place] for name, values in joined.items()} for place in selected.place]


def reference_routing(reference, row) -> tuple[torch.Tensor, torch.Tensor]:
    """[layers, tokens, top_k] experts and weights, worked out from the router logits of transformers."""
    logits = reference(torch.tensor([row]), output_router_logits=True).router_logits
    weights, experts = torch.stack(logits).float().softmax(-1).topk(TOP_K)
    return experts, weights / weights.sum(-1, keepdim=True)


@torch.no_grad()
def test_routing_is_that_of_transformers(small, small_reference):
    for row, records in zip(ROWS, routed(small, ROWS, (Routing(TOP_K),)), strict=True):
        experts, weights = reference_routing(small_reference, row)
        np.testing.assert_array_equal(records["experts"], experts)
        np.testing.assert_allclose(records["weights"], weights, atol=1e-5)


def test_only_wanted_tokens_are_returned(small):
    whole = routed(small, ROWS, (Routing(TOP_K),))
    last = routed(small, ROWS, (Routing(TOP_K),), wanted=slice(-2, None))
    for all_tokens, two in zip(whole, last, strict=True):
        np.testing.assert_array_equal(all_tokens["experts"][:, -2:], two["experts"])


def test_a_text_in_several_steps(small_folder, small):
    runtime = torchqwen_tpu.RuntimeConfig(prefill_chunk=8)
    chunked = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(small_folder, dtype="float32", runtime=runtime)
    for one, several in zip(*(routed(model, ROWS, (Routing(TOP_K),)) for model in (small, chunked)), strict=True):
        np.testing.assert_array_equal(one["experts"], several["experts"])


@dataclass(frozen=True)
class Kinds:
    """Says which values each layer names."""

    names = ()

    def layer(self, taps, batch, ops):
        SEEN.append(sorted(taps))
        return {}

    def step(self, layers, batch, select, ops):
        return ()


SEEN: list[list[str]] = []


def test_what_layers_name(tmp_path):
    model = torchqwen_tpu.AutoModelForCausalLM.from_pretrained(save_random(dense_config(), tmp_path), dtype="float32")
    SEEN.clear()
    routed(model, ROWS[:1], (Kinds(),))
    both = ["input", "mixed", "number", "output"]
    gated = [f"gated_delta_net.{name}" for name in ("A_log", "a", "b", "dt_bias", "state")]
    attention = [f"attention.{name}" for name in ("key", "pages", "query")]
    assert SEEN == [gated + both, attention + both, gated + both]


@dataclass
class Onlooker:
    """An observer that keeps what it sees."""

    recorder: Routing

    def __post_init__(self):
        self.extends, self.decodes = [], []

    def due(self, shape) -> bool:
        return True

    def extended(self, shape, header, records):
        self.extends.append(records)

    def decoded(self, shape, header, records):
        self.decodes.append(records)


@pytest.fixture
def onlooker(small):
    small.steps.observer = Onlooker(Routing(TOP_K))
    yield small.steps.observer
    small.steps.observer = None


@torch.no_grad()
def test_an_observer_sees_every_step_of_a_generation(small, small_reference, onlooker):
    ids = torch.tensor(ROWS[:1])
    sequence = small.generate(ids, max_new_tokens=12, do_sample=False)[0]
    experts, weights = reference_routing(small_reference, sequence[:-1].tolist())
    assert len(onlooker.extends) == 1
    steps = [records["experts"][:, :, 0].cpu() for records in onlooker.decodes]  # the first row of each decode step
    seen = torch.cat(steps)[:11].transpose(0, 1)  # 12 new tokens, of which the last is never taken in
    torch.testing.assert_close(seen.long(), experts[:, ids.shape[1] :])


def test_the_graph_without_an_observer_is_untouched(small):
    """What was compiled before is what runs after, and answers stay the same while somebody looks."""
    batch = padded(ROWS)
    plain = small.generate(**batch, max_new_tokens=10, do_sample=False)
    before, graphs = compilations(), dict(small.steps._graphs)
    small.steps.observer = Onlooker(Routing(TOP_K))
    try:
        assert torch.equal(small.generate(**batch, max_new_tokens=10, do_sample=False), plain)
    finally:
        small.steps.observer = None
    assert compilations() > before
    before = compilations()
    assert torch.equal(small.generate(**batch, max_new_tokens=10, do_sample=False), plain)
    assert compilations() == before
    assert all(small.steps._graphs[shape] is graph for shape, graph in graphs.items())
