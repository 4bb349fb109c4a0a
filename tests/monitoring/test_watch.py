"""The numerical watch finds planted faults and names the layer; a healthy model gives no warning."""

from __future__ import annotations

import contextlib
import json
import warnings

import numpy as np
import pytest
import torch
import torch_xla
from support import moe_config, padded, save_random
from watched import ROWS, generate

from torchqwen_tpu import AutoModelForCausalLM, RuntimeConfig, monitoring, score
from torchqwen_tpu.monitoring import Limits, NumericalWarning
from torchqwen_tpu.runtime.graph import compilations


@contextlib.contextmanager
def changed(parameter: torch.nn.Parameter, change):
    """A parameter that `change` works on in place, on the host, and that is restored afterwards."""
    before = parameter.detach().cpu().clone()
    after = before.clone()
    change(after)
    with torch.no_grad():
        parameter.copy_(after.to(parameter.device))
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(before.to(parameter.device))


def findings(model, run, **limits) -> list[monitoring.Finding]:
    with pytest.warns(NumericalWarning), monitoring.watch(model, limits=Limits(**limits)) as watch:
        run(model)
    return watch.findings


def test_a_healthy_model_gives_no_warning_and_the_same_answers(small, tmp_path):
    stream, report = tmp_path / "steps.jsonl", tmp_path / "report.html"
    plain = generate(small)
    with warnings.catch_warnings(), monitoring.watch(small, stream=stream, report=report) as watch:
        warnings.simplefilter("error", NumericalWarning)
        assert torch.equal(generate(small), plain)
    assert watch.findings == []
    entries = [json.loads(line) for line in stream.read_text().splitlines()]
    assert [entry["kind"] for entry in entries] == ["extend", "decode", "decode", "decode"]
    assert entries[0]["tokens"] == sum(map(len, ROWS))
    gated, attention, _ = entries[0]["layers"]
    assert 0 < gated["gates"]["beta_min"] < gated["gates"]["beta_max"] < 1
    assert sorted(state["position"] for state in gated["states"]) == sorted(map(len, ROWS))
    assert attention["attention"]["logit_max"] <= attention["attention"]["logit_bound"] * (1 + 1e-5)
    assert attention["router"]["tokens"] == sum(map(len, ROWS))
    assert watch.loads.total.sum() == 3 * 3 * (sum(map(len, ROWS)) + 3 * 3)  # layers, experts a token, tokens looked at
    assert report.read_text().count("<svg") == 3


def test_scores_are_watched(small):
    with monitoring.watch(small) as watch:
        score(small, ROWS[:2])
    assert watch.steps > 0 and watch.loads.total.any()


def test_nothing_is_left_behind(small):
    generate(small)
    before = compilations()
    with monitoring.watch(small):
        pass
    generate(small)
    assert compilations() == before and small.steps.observer is None


@torch.no_grad()
def test_without_a_watch_the_graphs_are_what_they_were(small):
    """Traced anew after a watch, because a weight was written to, all of them are graphs that were compiled before it."""
    generate(small)
    with monitoring.watch(small):
        generate(small)
    with changed(small.model.norm.weight, lambda weight: None):
        torch_xla.sync()
        before = compilations()
        generate(small)
        assert compilations() == before


def test_every_second_step(small, tmp_path):
    """Of each kind; those between are run by the graphs that run without a watch."""
    generate(small)
    stream = tmp_path / "steps.jsonl"
    with monitoring.watch(small, stream=stream, every=2):
        generate(small)
        generate(small)
    kinds = [json.loads(line)["kind"] for line in stream.read_text().splitlines()]
    assert kinds == ["extend", "decode", "decode", "decode"]  # of two prefills, and of six times eight decode steps
    with pytest.raises(ValueError, match="every"), monitoring.watch(small, every=0):
        pass


def test_two_watches_at_once_are_refused(small):
    with monitoring.watch(small), pytest.raises(RuntimeError, match="watched already"), monitoring.watch(small):
        pass


@torch.no_grad()
def test_a_nan_in_one_experts_weights(small, small_reference):
    """Layer, expert and first token are named."""
    logits = small_reference(torch.tensor(ROWS[:1]), output_router_logits=True).router_logits[1]
    first = int((logits.topk(3).indices == 5).any(1).nonzero()[0])

    def plant(weights):
        weights[5, 0, 0] = float("nan")

    with changed(small.model.layers[1].mlp.experts.gate_up_proj, plant):
        (finding,) = findings(small, generate)
    assert (finding.kind, finding.layer) == ("not_finite", 1)
    assert "after the experts" in finding.message and "went to expert 5" in finding.message
    assert f"token {first} of sequence 0" in finding.message


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_router_logits_that_are_not_finite(small, value):
    """They are no routing: the token gets NaN from this layer's experts, and the layer is named."""

    def plant(weights):
        weights[4, 0] = value

    with changed(small.model.layers[1].mlp.router.weight, plant):
        found = [one for one in findings(small, generate) if one.kind == "not_finite"]
    assert [one.layer for one in found] == [1] and "after the experts" in found[0].message


def test_a_nan_that_only_decoding_meets(small, tmp_path):
    """Every decode step is looked at: the token that is not finite is found wherever it lies among those of one go."""
    stream = tmp_path / "steps.jsonl"
    rows = [[token % 32 for token in row] for row in ROWS]
    new = generate(small, rows)[:, -20:].tolist()
    turn, sequence = next(
        (turn, sequence)
        for turn in range(2, 19) for sequence in range(3)
        if new[sequence][turn] >= 32 and sum(row[: turn + 1].count(new[sequence][turn]) for row in new) == 1
    )  # fmt: skip
    position = len(rows[sequence]) + turn

    def plant(weights):
        weights[new[sequence][turn]] = float("nan")

    named = f"token {position} of sequence {sequence}"
    with changed(small.model.embed_tokens.weight, plant), pytest.warns(NumericalWarning, match=named):
        with monitoring.watch(small, stream=stream):
            generate(small, rows)
    first = next(one for line in stream.read_text().splitlines() for one in json.loads(line)["not_finite"])
    assert (first["layer"], first["sequence"], first["position"], first["tokens"]) == (0, sequence, position, 1)


@torch.no_grad()
def test_one_expert_that_takes_nearly_all_tokens(small, small_reference):
    """Its weights are fitted to what the router sees."""
    seen = []
    gate = small_reference.model.layers[2].mlp.gate
    hook = gate.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].reshape(-1, gate.weight.shape[1])))
    for row in ROWS:
        small_reference(torch.tensor([row]))
    hook.remove()
    hidden = torch.cat(seen)
    fitted = torch.linalg.lstsq(hidden, torch.ones(len(hidden), 1)).solution[:, 0]
    assert (hidden @ fitted > 0.1).float().mean() >= 0.9

    def plant(weights):
        weights[:, : gate.weight.shape[0]] *= 1e-3
        weights[:, 6] = 100 * fitted

    with changed(small.model.layers[2].mlp.router.weight, plant):
        (finding,) = findings(small, generate)
    assert (finding.kind, finding.layer) == ("expert_share", 2) and "expert 6" in finding.message


def test_softmax_saturation_from_scaled_queries(small):
    def plant(weights):
        weights.add_(1).mul_(300).sub_(1)  # the norm multiplies by one plus its weight

    with changed(small.model.layers[1].self_attn.q_norm.weight, plant):
        found = findings(small, generate)
    assert {(one.kind, one.layer) for one in found} >= {("attention_logit", 1), ("saturated", 1)}


def test_a_state_that_blows_up(small):
    """Values a million times too large."""
    def plant(weights):
        weights.mul_(1e6)

    with changed(small.model.layers[2].linear_attn.conv1d.weight, plant):
        found = findings(small, generate)
    assert [one.layer for one in found if one.kind == "state_norm"] == [2]


def numbers(value) -> list[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, dict | list):
        return [number for part in (value.values() if isinstance(value, dict) else value) for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


@torch.no_grad()
@pytest.mark.parametrize("new_tokens", [1, pytest.param(10, marks=pytest.mark.long)])
def test_scanned_layers_show_what_layers_one_by_one_show(tmp_path, new_tokens):
    """A NaN in an expert of the last layer, which is the second of its stack."""
    folder = save_random(moe_config(layer_types=["full_attention", "linear_attention"] * 2, num_hidden_layers=4), tmp_path)
    seen = []
    for scan, name, where in ((False, "3", 5), (True, "1:4:2", (1, 5))):
        stream = tmp_path / f"scan_{scan}"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", runtime=RuntimeConfig(scan_layers=scan))
        model.model.layers.get_submodule(name).mlp.experts.gate_up_proj[where] = float("nan")
        with pytest.warns(NumericalWarning), monitoring.watch(model, stream=stream) as watch:
            model.generate(**padded(ROWS[:2]), max_new_tokens=new_tokens, do_sample=False)
        seen.append((watch.findings, [json.loads(line) for line in stream.read_text().splitlines()]))
    (findings, steps), (scanned_findings, scanned_steps) = seen
    assert [(one.kind, one.layer) for one in findings] == [("not_finite", 3)] and "to expert 5" in findings[0].message
    assert scanned_findings == findings
    assert [step["not_finite"] for step in scanned_steps] == [step["not_finite"] for step in steps]
    np.testing.assert_allclose(numbers(scanned_steps), numbers(steps), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("exponent", "found"), [(0.5, False), (3.0, True)])
def test_growth_of_a_state(exponent, found):
    growth = monitoring.limits.Growth()
    seen = [growth.add(0, 0, position, float(position) ** exponent) for position in range(8, 2000, 8)]
    exponents = [value for value in seen if value is not None]
    np.testing.assert_allclose(exponents, exponent)
    assert bool(exponents) and found == (max(exponents) > Limits().state_growth)
