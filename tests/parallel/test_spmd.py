"""Several devices give the answers of one: logits, greedy tokens, beams, samples, a second turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from answers import NEW_TOKENS, REQUESTS, ROWS, sampled
from support import (
    PROMPT_LENGTHS,
    TOLERANCE,
    assert_rows_match,
    moe_config,
    padded,
    reference_logits,
    reference_of,
    reference_tokens,
    save_random,
)

SCRIPT = Path(__file__).parent / "answers.py"
MESHES = {"4x2 dp": (4, 2, "dp"), "4x2 dp_tp": (4, 2, "dp_tp"), "1x2 tp": (1, 2, "tp")}

pytestmark = pytest.mark.spmd


def run(folder: Path, output: Path, chips: int, cores: int, layout: str, *options: str, flags=None) -> dict:
    """The answers of a model on a mesh, from a process of its own; `flags` in place of this one's XLA_FLAGS."""
    environment = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"}
    if flags is not None:
        environment["XLA_FLAGS"] = flags
    mesh = ["--chips", str(chips), "--cores", str(cores), "--layout", layout]
    command = [sys.executable, str(SCRIPT), str(folder), str(output), *mesh, *options]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return torch.load(output)


@pytest.fixture(scope="module", params=MESHES.values(), ids=MESHES)
def many(request, small_folder, tmp_path_factory):
    return run(small_folder, tmp_path_factory.mktemp("spmd") / "answers.pt", *request.param)


@pytest.fixture(scope="module")
def expected(small_reference):
    return [reference_logits(small_reference, row) for row in ROWS]


@pytest.fixture(scope="module")
def expected_tokens(small_reference):
    return [reference_tokens(small_reference, row, NEW_TOKENS) for row in ROWS]


@pytest.fixture(scope="module")
def expected_beams(small_reference):
    ids = torch.tensor(ROWS[1:2])
    return small_reference.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=3)


@pytest.fixture(scope="module")
def sampled_on_one_device(small):
    return sampled(small)


def test_logits(many, expected):
    assert_rows_match(many["logits"], padded(ROWS, "left")["attention_mask"], expected)
    torch.testing.assert_close(many["alone"][0], expected[1], atol=TOLERANCE, rtol=0)


def test_greedy(many, expected_tokens):
    """A batch of three, which is padded to the mesh, and a batch of one."""
    assert many["greedy"][:, -NEW_TOKENS:].tolist() == expected_tokens
    assert many["greedy alone"][0].tolist() == ROWS[1] + expected_tokens[1]


def test_beams(many, expected_beams):
    assert torch.equal(many["beams"], expected_beams)


def test_a_seed_gives_the_answer_of_one_device(many, sampled_on_one_device):
    assert torch.equal(many["sampled"], sampled_on_one_device)


def test_scores(many, small_reference):
    expected = []
    for context, after in REQUESTS:
        logprobs = reference_logits(small_reference, context + after).log_softmax(-1)[len(context) - 1 : -1]
        expected.append(logprobs.gather(1, torch.tensor(after)[:, None])[:, 0])
    torch.testing.assert_close(many["scores"], torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_second_turn(many, small_reference):
    mask, ids = many["turn mask"].bool(), many["turn"]
    for number in range(3):
        row = ids[number, : mask.shape[1]][mask[number]].tolist()
        assert ids[number, mask.shape[1] :].tolist() == reference_tokens(small_reference, row, 8)


def test_nothing_is_compiled_after_warm_up(many):
    assert many["compilations"] == 0


def test_another_mesh_in_the_same_process_is_refused(many):
    assert "devices" in many["other mesh"]["RuntimeError"]


@pytest.mark.parametrize("lengths", [PROMPT_LENGTHS[:8], pytest.param(PROMPT_LENGTHS, marks=pytest.mark.slow)], ids=max)
def test_the_trained_checkpoint_on_eight_devices(tiny_folder, tiny_reference, tiny_continuations, text, tmp_path, lengths):
    prompts = [text[:length] for length in lengths]
    rows, tokens = zip(*tiny_continuations, strict=True)
    parity = ("--parity", json.dumps({"prompts": prompts, "greedy": rows, "new_tokens": 64}))
    # A prompt of up to 64 tokens a rank, or eight ranks of 1,024 rows each on a few cores: there the optimiser pays.
    flags = None if max(lengths) <= 64 else ""
    answer = run(tiny_folder, tmp_path / "answers.pt", *MESHES["4x2 dp"], *parity, flags=flags)
    expected = [reference_logits(tiny_reference, row) for row in prompts]
    assert_rows_match(answer["logits"], padded(prompts, "left")["attention_mask"], expected)
    assert answer["greedy"][:, -64:].tolist() == list(tokens)


def test_heads_that_the_mesh_does_not_divide(tiny_folder, tmp_path):
    """Two heads of keys and values cannot be split over eight devices."""
    assert "num_key_value_heads = 2 over 8" in run(tiny_folder, tmp_path / "answers.pt", 4, 2, "tp")["refused"]


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_scanned_layers(mesh, tmp_path):
    """Two periods and a layer more."""
    kinds = [*["linear_attention", "full_attention"] * 2, "linear_attention"]
    folder = save_random(moe_config(layer_types=kinds, num_hidden_layers=len(kinds)), tmp_path)
    parity = ("--parity", json.dumps({"prompts": ROWS, "greedy": ROWS, "new_tokens": 8}))
    answer = run(folder, tmp_path / "answers.pt", *mesh, "--scan-layers", *parity)
    reference = reference_of(folder)
    expected = [reference_logits(reference, row) for row in ROWS]
    assert_rows_match(answer["logits"], padded(ROWS, "left")["attention_mask"], expected)
    assert answer["greedy"][:, -8:].tolist() == [reference_tokens(reference, row, 8) for row in ROWS]
