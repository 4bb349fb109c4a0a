"""The watch in steps that the TPU compiler compiled: 397B, cut to one period of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchqwen_tpu.monitoring.modelled import modelled_costs, table
from torchqwen_tpu.planning.request import PlanRequest

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "Qwen3.5-397B-A17B.json"
LAYERS, VOCABULARY = 4, 8192
SHARE = 0.03


@pytest.mark.slow
def test_the_watch_adds_little_time_and_no_collective(tmp_path):
    config = json.loads(CONFIG.read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": LAYERS, "layer_types": text["layer_types"][:LAYERS], "vocab_size": VOCABULARY}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    costs = modelled_costs(PlanRequest(str(file), dtype="fp8", state_dtype="bfloat16"))
    assert set(costs) == {"prefill", "mixed", "decode, start", "decode, end"}
    for cost in costs.values():
        assert cost.added < SHARE, table(costs)
        assert cost.collectives == {}
        assert not cost.watched.unknown_loops
