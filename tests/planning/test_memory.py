"""Memory by hand, and what would help where a model does not fit. Nothing is compiled: the arguments alone are too large, or
enough to know."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from custom_ops.cost_model import GIB, TPU7X
from torchqwen_tpu.checkpoint.resolve import read_config
from torchqwen_tpu.inputs import limit_of
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning import PlanRequest, plan
from torchqwen_tpu.planning.arguments import sizes_of
from torchqwen_tpu.planning.memory import memory_of

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
M = 1e6


def memory(name: str, layout: str = "dp", chips: int = 4, **changes):
    request = PlanRequest("m", **{"dtype": "fp8", "state_dtype": "bfloat16", **changes})
    config, mesh = read_config(CONFIGS / name), DeviceMesh(chips, 2, layout)
    sizes = sizes_of(config, mesh, request)
    return memory_of(sizes, (), request, TPU7X, mesh.ranks, limit_of(config.get_text_config()))


def test_397b_in_fp8_by_hand():
    of_a_core = memory("Qwen3.5-397B-A17B.json")
    # In parameters (FP8: a byte each; router, embedding and head in BF16), of eight cores.
    weights = 60 * 6442 * M / 8 + 45 * 118.0 * M + 15 * 104.9 * M + 60 * 12.6 * M + 60 * 2 * 2.1 * M + 2 * 2 * 1017 * M
    assert sum(of_a_core.weights.values()) == pytest.approx(weights, rel=0.02)
    # Eight sequences of 9,216 tokens: 94.4 MB of states each, 15,360 bytes a token of FP8 pages twice over in BF16.
    assert of_a_core.states["recurrent states"] == pytest.approx(8 * 94.4 * M, rel=0.02)
    assert of_a_core.states["KV pages"] == 8 * 9216 * 2 * 15360
    assert of_a_core.used == pytest.approx(weights + 8 * (94.4 * M + 9216 * 2 * 15360), rel=0.02)


def test_35b_in_bf16_on_one_chip_by_hand():
    of_a_core = memory("Qwen3.5-35B-A3B.json", chips=1, dtype="bf16", concurrency=16)
    experts = 40 * 256 * 3 * 512 * 2048 * 2 / 2
    delta = 30 * 2 * (2048 * (2 * 2048 + 2 * 4096 + 64) + 4096 * 2048 + 4 * 8192)
    attention = 10 * 2 * (2048 * (2 * 4096 + 2 * 512) + 4096 * 2048)
    others = 40 * 2 * (3 * 512 * 2048 + 257 * 2048) + 2 * 2 * 248320 * 2048
    states = 8 * (30 * 32 * 128 * 128 * 2 + 9216 * 10 * 2 * 2 * 256 * 2)
    assert of_a_core.used == pytest.approx(experts + delta + attention + others + states, rel=0.02)


@pytest.mark.parametrize("sequences", [1, 3, 8, 37, 200])
def test_the_largest_concurrency_and_context_are_the_last_that_fit(sequences):
    given = memory("Qwen3.5-397B-A17B.json", concurrency=8 * sequences, input_len=30000)
    assert given.fits == (given.largest_concurrency >= 8 * sequences)
    most = given.largest_concurrency
    assert memory("Qwen3.5-397B-A17B.json", concurrency=most, input_len=30000).fits
    assert not memory("Qwen3.5-397B-A17B.json", concurrency=most + 8, input_len=30000).fits
    longest = given.largest_context
    assert memory("Qwen3.5-397B-A17B.json", concurrency=8 * sequences, input_len=longest - 1024).fits
    if longest < 262144:
        more = memory("Qwen3.5-397B-A17B.json", concurrency=8 * sequences, input_len=longest)
        assert not more.fits


def test_heads_that_are_split_are_kept_once():
    whole, split = (memory("Qwen3.5-397B-A17B.json", layout) for layout in ("dp", "dp_tp"))
    assert split.weights["attention"] < 0.51 * whole.weights["attention"]
    # Twice the sequences a rank, half of the heads of each.
    assert split.states["KV pages"] == whole.states["KV pages"]


def test_what_would_help_is_computed():
    answer = plan(str(CONFIGS / "Qwen3.5-397B-A17B.json"), state_dtype="bfloat16")
    layout = answer.best
    assert not answer.fits and layout.memory.left < 0 and not layout.steps
    helps = {remedy.change: remedy.left for remedy in layout.remedies}
    assert helps["FP8 weights"] == pytest.approx(memory("Qwen3.5-397B-A17B.json").left, abs=1)
    (larger,) = (left for change, left in helps.items() if "topology tpu7x:2x2x2 (8 chips)" in change)
    experts = layout.memory.weights["routed experts"]
    assert larger >= layout.memory.left + experts // 2
    assert helps["layout dp4tp2"] > layout.memory.left
    for change, left in helps.items():
        assert ("not enough" in str(dataclasses.replace(layout.remedies[0], change=change, left=left))) == (left < 0)


def test_a_slower_chip_with_less_memory():
    answer = plan(str(CONFIGS / "Qwen3.5-35B-A3B.json"), topology="v5e:2x4", concurrency=256)
    assert not answer.fits and answer.best.memory.capacity < 16 * GIB
    assert any("topology v5e:4x4 (16 chips)" in remedy.change for remedy in answer.best.remedies)
