"""The one table of parallelism: what it says of every parameter, and of every layout."""

from __future__ import annotations

import pytest
import torch
from support import dense_config, moe_config

from torchqwen_tpu import ParallelConfig, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from torchqwen_tpu.models.causal_lm import check_divisible
from torchqwen_tpu.parallel.mesh import DeviceMesh, build_mesh
from torchqwen_tpu.parallel.rules import LAYOUT_RULES, PARAMETER_AXES, parameter_axes


def parameters(cls, config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: value.shape for name, value in cls(config).named_parameters()}


@pytest.fixture(scope="module")
def moe():
    return parameters(Qwen3_5MoeForCausalLM, moe_config(attention_bias=True))


def test_every_rule_names_a_parameter():
    """Scales among them, which only FP8 weights have: a module declares them, and without values they are not listed."""
    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(moe_config(attention_bias=True))
    declared = [f"{prefix}.{name}" for prefix, module in model.named_modules() for name in module._parameters]
    for ending in PARAMETER_AXES:
        assert any(name.endswith(ending) for name in declared), ending


def test_every_parameter_has_an_axis_for_each_dimension(moe):
    for name, shape in {**moe, **parameters(Qwen3_5ForCausalLM, dense_config())}.items():
        assert len(parameter_axes(name, len(shape))) == len(shape), name


def test_every_parameter_divides(moe):
    """What a layout splits comes in whole heads and whole experts."""
    config = moe_config()
    for name, shape in moe.items():
        heads = config.num_key_value_heads if ".self_attn." in name else config.linear_num_key_heads
        for size, axis in zip(shape, parameter_axes(name, len(shape)), strict=True):
            assert axis != "heads" or size % heads == 0, name
            assert axis != "experts" or size == config.num_experts, name


@pytest.mark.parametrize(
    "name, axes",
    [
        ("model.layers.0.linear_attn.A_log", ("heads",)),
        ("model.layers.3.mlp.experts.down_proj", ("experts", None, None)),
        ("model.layers.3.mlp.router.weight", (None, None)),
        ("model.layers.3.mlp.shared_expert.gate_up_proj.weight", (None, None)),
        ("model.embed_tokens.weight", (None, None)),
        ("lm_head.weight", (None, None)),
        ("model.norm.weight", (None,)),
    ],
)
def test_axes_of_a_parameter(name, axes):
    assert parameter_axes(name, len(axes)) == axes


def test_column_and_row_parallel_matrices_meet():
    """What comes out of a layer's first matrices split by heads goes into its last one split the same way."""
    for first, last in (("linear_attn.in_proj_qkvz", "linear_attn.out_proj"), ("self_attn.qkv_proj", "self_attn.o_proj")):
        before, after = PARAMETER_AXES[f"{first}.weight"], PARAMETER_AXES[f"{last}.weight"]
        assert sorted(before, key=str) == sorted(after, key=str) and before != after


@pytest.mark.parametrize(
    "layout, tokens, heads, experts",
    [("dp", 8, 1, 8), ("dp_tp", 4, 2, 8), ("tp", 1, 8, 8)],
)
def test_layouts(layout, tokens, heads, experts):
    mesh = DeviceMesh(4, 2, layout)
    assert (mesh.shards("tokens"), mesh.shards("heads"), mesh.shards("experts")) == (tokens, heads, experts)
    assert mesh.ranks == tokens
    assert tuple(mesh.spec(("experts", None))) == (("chip", "core"), None)


@pytest.mark.parametrize("layout", LAYOUT_RULES)
def test_a_token_and_its_heads_never_share_a_mesh_axis(layout):
    rules = LAYOUT_RULES[layout]
    assert not set(rules["tokens"]) & set(rules["heads"])
    assert rules["experts"] == ("chip", "core")


def test_one_device_splits_nothing():
    mesh = build_mesh(ParallelConfig())
    assert (mesh.chips, mesh.cores, mesh.ranks, mesh.abstract) == (1, 1, 1, None)
    assert mesh.spec(("tokens", "heads")) == mesh.spec((None, None))


@pytest.mark.parametrize("arguments", [{"layout": "ep"}, {"chips": 0}, {"cores": -1}, {"chips": 2.0}], ids=str)
def test_configurations_that_make_no_sense(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ParallelConfig(**arguments)


@pytest.mark.parametrize("layout", ["dp", "dp_tp", "tp"])
def test_experts_that_do_not_divide_by_the_devices_are_refused(layout):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
    check_divisible(moe_config(num_experts=16, **sizes), DeviceMesh(4, 2, layout))
    with pytest.raises(ValueError, match="num_experts = 12 over 8 devices.*number of devices"):
        check_divisible(moe_config(num_experts=12, **sizes), DeviceMesh(4, 2, layout))
