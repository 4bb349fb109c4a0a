"""Layers that are stacked and scanned give the answers of layers one by one, under the same published names."""

from __future__ import annotations

import pytest
import torch
from support import moe_config, padded, random_rows, save_random

from torchqwen_tpu import AutoModelForCausalLM, RuntimeConfig
from torchqwen_tpu.models.stacking import layer_runs, layers_of, stack_name

LINEAR, FULL = "linear_attention", "full_attention"
KINDS = [FULL, *[LINEAR, FULL] * 2, LINEAR, LINEAR]
"""Three periods and a layer more."""
BATCH = padded(random_rows((4, 17, 1), seed=40), "left")


def names(kinds: list[str], scan: bool = True) -> list[list[str]]:
    return [[stack_name(stack) for stack in run] for run in layer_runs(kinds, scan)]


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ([*[LINEAR] * 3, FULL] * 15, [["0:60:4", "1:60:4", "2:60:4", "3:60:4"]]),
        ([LINEAR, FULL, LINEAR], [["0"], ["1"], ["2"]]),
        ([LINEAR, LINEAR, LINEAR], [["0:3:1"]]),
        ([FULL, *[LINEAR, LINEAR, FULL] * 2, LINEAR], [["0:6:3", "1:6:3", "2:6:3"], ["6"], ["7"]]),
        ([LINEAR, LINEAR, FULL, LINEAR, FULL, LINEAR, FULL], [["0"], ["1:7:2", "2:7:2"]]),
        ([LINEAR], [["0"]]),
    ],
)
def test_the_longest_repetition_becomes_stacks(kinds, expected):
    assert names(kinds) == expected
    assert names(kinds, scan=False) == [[str(index)] for index in range(len(kinds))]
    covered = [index for run in layer_runs(kinds, True) for stack in run for index in stack]
    assert sorted(covered) == list(range(len(kinds)))


def test_layers_of_a_stack():
    assert layers_of("model.layers.1:9:4.mlp.router.weight") == (
        "model.layers.1.mlp.router.weight",
        "model.layers.5.mlp.router.weight",
    )
    assert layers_of("model.layers.1.mlp.router.weight") is None
    assert layers_of("model.norm.weight") is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random(moe_config(layer_types=KINDS, num_hidden_layers=len(KINDS)), tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def unrolled(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


@pytest.fixture(scope="module")
def scanned(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", runtime=RuntimeConfig(scan_layers=True))


def test_the_layers_are_stacked(unrolled, scanned):
    assert [name for name in scanned.model.layers] == ["0:6:2", "1:6:2", "6"]
    assert len(list(scanned.parameters())) < len(list(unrolled.parameters()))


def test_logits_and_hidden_states(unrolled, scanned):
    expected, actual = (model(**BATCH, output_hidden_states=True) for model in (unrolled, scanned))
    torch.testing.assert_close(actual.logits.cpu(), expected.logits.cpu(), atol=1e-5, rtol=0)
    assert len(actual.hidden_states) == len(KINDS) + 1
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=1e-5, rtol=0)


def test_tokens(unrolled, scanned):
    for arguments in ({"do_sample": False}, {"do_sample": True, "seed": [1, 2, 3]}):
        expected, actual = (model.generate(**BATCH, max_new_tokens=20, **arguments) for model in (unrolled, scanned))
        assert torch.equal(actual, expected)


def test_state_dict_has_the_published_names_and_values(unrolled, scanned):
    expected, actual = unrolled.state_dict(), scanned.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name].cpu(), expected[name].cpu()) for name in expected)


def test_saved_and_loaded_in_the_other_form(unrolled, scanned, tmp_path):
    scanned.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").state_dict()
    expected = unrolled.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name].cpu(), expected[name].cpu()) for name in expected)


def test_weights_loaded_into_stacks(folder, unrolled):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", runtime=RuntimeConfig(scan_layers=True))
    state = {name: value.cpu() for name, value in unrolled.state_dict().items()}
    name = "model.layers.2.self_attn.o_proj.weight"
    state[name] = state[name] + 1
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()[name].cpu(), state[name])
    missing = {key: value for key, value in state.items() if key != name}
    with pytest.raises(RuntimeError, match=name):
        model.load_state_dict(missing)
