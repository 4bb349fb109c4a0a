"""Whole plans by the TPU compiler: a cut 397B in every run, the published sizes among the slow tests."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import torchqwen_tpu
from custom_ops.cost_model import GIB
from torchqwen_tpu.planning.html import render
from torchqwen_tpu.planning.report import format_plan

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
LAYERS, HIDDEN, EXPERTS, WIDTH, VOCABULARY, DEVICES = 4, 4096, 64, 1024, 32768, 8


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    """397B with one period of layers, an eighth of the experts and of the vocabulary."""
    config = json.loads((CONFIGS / "Qwen3.5-397B-A17B.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": LAYERS, "layer_types": text["layer_types"][:LAYERS], "num_experts": EXPERTS}
    text["vocab_size"] = VOCABULARY
    file = tmp_path_factory.mktemp("cut") / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.fixture(scope="module")
def planned(cut):
    return torchqwen_tpu.plan(str(cut), concurrency=64, input_len=1024, output_len=64, prefill_chunk=128)


def test_memory_agrees_with_a_hand_count(planned):
    memory = planned.best.memory
    assert memory.weights["routed experts"] == LAYERS * EXPERTS * 3 * WIDTH * HIDDEN * 2 // DEVICES
    assert memory.weights["embedding"] == memory.weights["head"] == VOCABULARY * HIDDEN * 2
    assert memory.weights["Gated DeltaNet"] == pytest.approx(3 * 118.0e6 * 2, rel=0.01)
    assert memory.weights["attention"] == pytest.approx(104.9e6 * 2, rel=0.01)
    # Eight sequences a core, their tokens rounded up to a power of two of pages of 256.
    assert memory.states["KV pages"] == 8 * 8 * 256 * 2 * 2 * 256 * 2
    assert memory.states["recurrent states"] == 3 * 8 * 64 * 128 * 128 * 2
    assert memory.padding < 0.02 * memory.used


def test_what_is_left_fits(planned):
    memory = planned.best.memory
    assert memory.fits and planned.fits
    assert memory.used + memory.left == memory.capacity == 96 * GIB
    more = memory.largest_concurrency
    assert more > 64 and more % DEVICES == 0
    assert memory.largest_context > 1088


def test_every_kind_of_step_has_a_time_above_its_roofline(planned):
    steps = planned.best.steps
    assert set(steps) == {"prefill", "mixed", "decode, start", "decode, end"}
    for step in steps.values():
        assert step.seconds > step.roofline.peak > 0
        assert step.seconds == pytest.approx(sum(cost.seconds for cost in step.costs.values()), rel=0.01)
        assert not step.unknown_loops
    assert steps["decode, end"].seconds >= steps["decode, start"].seconds


def test_kernels_and_collectives_of_every_layer_are_there(planned):
    step = planned.best.steps["decode, start"]
    assert step.costs["kernel gated_delta_net_decode"].runs == pytest.approx(3)
    of_experts = [entry for entry in step.collectives if entry.operation == "ragged_moe"]
    assert {entry.devices for entry in of_experts} == {DEVICES}
    assert sum(entry.runs for entry in of_experts) >= 2 * LAYERS


class _Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags = [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_file(planned):
    page = render(planned)
    parser = _Balanced()
    parser.feed(page)
    assert not parser.open and {"svg", "table", "style"} <= parser.tags
    assert not re.search(r'(?:src|href)=|url\(|@import|<script', page)
    assert "modelled" in page


def test_json_and_text(planned):
    answer = json.loads(json.dumps(planned.to_dict()))
    assert answer["best"] == "dp" and answer["layouts"][0]["fits"]
    assert "modelled" in format_plan(planned)


@pytest.mark.slow
def test_397b_in_fp8_fits_one_machine():
    plan = torchqwen_tpu.plan(str(CONFIGS / "Qwen3.5-397B-A17B.json"), dtype="fp8")
    weights = sum(plan.best.memory.weights.values())
    assert weights == pytest.approx(48.3e9 + 7.8e9 + 2 * 2.03e9, rel=0.02)
    assert plan.best.steps["decode, start"].roofline.peak == pytest.approx(12.6e-3, rel=0.1)


@pytest.mark.slow
def test_35b_in_bf16_fits_one_chip():
    plan = torchqwen_tpu.plan(str(CONFIGS / "Qwen3.5-35B-A3B.json"), topology="tpu7x:1x1x1", concurrency=8)
    assert sum(plan.best.memory.weights.values()) == pytest.approx(
        (sum(plan.parameters.values()) + plan.parameters["embedding"] * 2) * 2 / 2, rel=0.15
    )
