"""FP8 checkpoints in every form in which they come, under every policy."""

from __future__ import annotations

import pytest
import torch
import transformers
from checkpoints import (
    TEXT,
    WHOLE,
    Checkpoint,
    assert_same,
    dequantize,
    dequantized,
    load,
    published_state,
    quantized,
    random_checkpoint,
    unfuse,
    wide_config,
)  # fmt: skip
from conftest import TINY
from support import padded, random_rows, reference_logits

from torchqwen_tpu import RuntimeConfig
from torchqwen_tpu.checkpoint import fp8
from torchqwen_tpu.checkpoint.fp8 import quantize_blocks, requantize_channels
from torchqwen_tpu.config import QUANTIZATIONS

FP8 = torch.float8_e4m3fn
TINY_FP8 = TINY.with_name("tiny-qwen3.5-moe-fp8")
ERROR = 0.04
"""Bound of the relative error that rounding FP8 numbers to FP8 again adds to a kind of weight: 2⁻⁴ at most for a number,
spread evenly over its range 2.6 % in the root of the mean squares."""


def load_as(policy: str | None, folder, dtype="float32"):
    return load(folder, dtype=dtype, runtime=RuntimeConfig(quantization=policy))


def fp8_names(model) -> set[str]:
    return {name for name, value in model.named_parameters() if value.dtype == torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def wide() -> Checkpoint:
    return random_checkpoint(wide_config(), seed=3)


@pytest.fixture(scope="module")
def wide_fp8(wide) -> Checkpoint:
    return quantized(wide)


@pytest.fixture(scope="module")
def wide_folder(wide_fp8, tmp_path_factory):
    return wide_fp8.write(tmp_path_factory.mktemp("wide"), shards=3)


@pytest.fixture(scope="module")
def row() -> list[int]:
    return random_rows([9])[0]


@pytest.fixture(scope="module")
def logits(wide_fp8, row, tmp_path_factory) -> torch.Tensor:
    """Of the same numbers in float32."""
    plain = load(dequantized(wide_fp8).write(tmp_path_factory.mktemp("plain")), dtype="float32")
    return plain(**padded([row])).logits[0].cpu()


@pytest.fixture(scope="module")
def tiny_fp8_logits(text) -> torch.Tensor:
    """transformers' of the trained checkpoint, dequantised. (Its class for the text model alone leaves scales out.)"""
    reference = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        TINY_FP8, dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    return reference_logits(reference.eval(), text[:37])


@pytest.mark.parametrize("policy", ["keep", "dequantize"])
def test_trained_checkpoint_has_the_logits_of_transformers(tiny_fp8_logits, text, policy):
    result = load_as(policy, TINY_FP8)(torch.tensor([text[:37]])).logits[0].cpu()
    torch.testing.assert_close(result, tiny_fp8_logits, atol=1e-3, rtol=0)


def test_trained_checkpoint_requantized(tiny_fp8_logits, text):
    """The bound of rounding twice: 0.05 nats a token, about what FP8 itself costs this checkpoint, and 4 % of the weights."""
    model = load_as("channel", TINY_FP8)
    result = model(torch.tensor([text[:37]])).logits[0].cpu().log_softmax(-1)
    expected = tiny_fp8_logits.log_softmax(-1)
    assert (expected.exp() * (expected - result)).sum(-1).mean() < 0.05
    assert len(model.requantization_error) == 8
    assert all(0.01 < error < ERROR for error in model.requantization_error.values())


def test_a_cpu_dequantizes_unless_asked(wide_folder):
    model = load(wide_folder)
    assert not fp8_names(model) and not model.requantization_error
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16, torch.float32}


def test_dequantized(wide_fp8, wide_folder):
    expected = dequantized(wide_fp8)
    unexpanded = {name: fused(expected.tensors, name) for name in dequantized_parameters(wide_folder)}
    assert_same(published_state(load_as("dequantize", wide_folder)), unexpanded)


def dequantized_parameters(folder) -> list[str]:
    return list(published_state(load_as("dequantize", folder)))


def fused(tensors, parameter: str) -> torch.Tensor:
    """A parameter from tensors in which experts are one each."""
    name = WHOLE + parameter.removeprefix(TEXT) if parameter.startswith(TEXT) else parameter
    if name in tensors:
        return tensors[name].float()
    stem, _, part = name.rpartition(".")
    singles = []
    for expert in range(8):
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        singles.append(torch.cat([tensors[f"{stem}.{expert}.{one}.weight"] for one in parts]))
    return torch.stack(singles).float()


def test_kept_numbers_and_scales_are_those_of_the_files(wide_fp8, wide_folder):
    """What is merged and regrouped on the device comes apart again; scales are there for every row and block of columns."""
    state = published_state(load_as("keep", wide_folder))
    tensors = wide_fp8.tensors
    for part in ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj", "mlp.shared_expert.up_proj"):
        assert torch.equal(state[f"model.layers.0.{part}.weight"].float(), tensors[f"{WHOLE}layers.0.{part}.weight"].float())
        scale = tensors[f"{WHOLE}layers.0.{part}.weight_scale_inv"].float().repeat_interleave(128, dim=0)
        assert torch.equal(state[f"model.layers.0.{part}.weight_scale"], scale[: len(state[f"model.layers.0.{part}.weight"])])
    experts = state["model.layers.1.mlp.experts.gate_up_proj"], state["model.layers.1.mlp.experts.gate_up_scale"]
    assert experts[0].dtype == torch.float8_e4m3fn and experts[1].shape == (8, 2, 2)
    assert torch.equal(dequantize(*experts), fused(dequantized(wide_fp8).tensors, "model.layers.1.mlp.experts.gate_up_proj"))


@pytest.mark.parametrize("policy", ["keep", "dequantize"])
def test_logits_are_those_of_the_same_numbers(wide_folder, row, logits, policy):
    model = load_as(policy, wide_folder)
    torch.testing.assert_close(model(**padded([row])).logits[0].cpu(), logits, atol=1e-4, rtol=0)


def test_requantized_logits_are_those_of_the_requantized_numbers(wide_folder, row):
    """Channel scales are regrouped with the columns that they belong to."""
    model = load_as("channel", wide_folder)
    assert len(fp8_names(model)) == 12
    result = model(**padded([row])).logits[0].cpu()
    state = published_state(model)
    plain = load_as("dequantize", wide_folder)
    widened = {}
    for name, value in published_state(plain).items():
        scale = state.get(name + "_scale", state.get(name.removesuffix("_proj") + "_scale"))
        widened[name] = state[name].float() if scale is None else state[name].float() * scale.unsqueeze(-1)
        torch.testing.assert_close(widened[name], value, atol=0.1 * value.abs().max().item(), rtol=0)
    plain.load_state_dict(widened)
    torch.testing.assert_close(plain(**padded([row])).logits[0].cpu(), result, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", QUANTIZATIONS)
@pytest.mark.parametrize("form", ["FP32 scales", "fused", "text model"])
def test_other_forms_of_the_same_numbers(wide, wide_folder, tmp_path, form, policy):
    checkpoint = quantized(wide, torch.float32 if form == "FP32 scales" else torch.bfloat16, fused=form == "fused")
    if form == "FP32 scales":
        expected = load_as(policy, checkpoint.write(tmp_path / "whole"))
    else:
        expected = load_as(policy, wide_folder)
    if form == "text model":
        checkpoint = Checkpoint(checkpoint.config.get_text_config(), checkpoint.parameters())
    assert_same_numbers(published_state(load_as(policy, checkpoint.write(tmp_path / "other"))), published_state(expected))


def assert_same_numbers(result, expected) -> None:
    assert_same(*({name: tensor.float() for name, tensor in state.items()} for state in (result, expected)))


def test_experts_of_a_width_that_blocks_do_not_divide(tmp_path):
    """One tensor an expert, gate and up rows would share a block: they are dequantised, to the same numbers."""
    checkpoint = quantized(random_checkpoint(wide_config(moe_intermediate_size=72)))
    model = load_as("keep", checkpoint.write(tmp_path))
    assert not any(".experts." in name for name in fp8_names(model)) and fp8_names(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(published_state(model)[name], fused(dequantized(checkpoint).tensors, name))


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_mixed_precisions(wide, wide_fp8, tmp_path, row, policy):
    """A merged matrix, or the experts of a layer, of which a part is BF16 become the model's dtype as a whole."""
    plain = dict(wide.tensors)
    unfuse(plain)
    mixed = {
        WHOLE + "layers.1.self_attn.k_proj.weight": "self_attn.qkv_proj.weight",
        WHOLE + "layers.1.mlp.experts.3.down_proj.weight": "mlp.experts.",
    }

    def change(tensors):
        for name in mixed:
            tensors[name] = plain[name]
            del tensors[name + "_scale_inv"]

    model = load_as(policy, wide_fp8.write(tmp_path, change=change))
    names = fp8_names(model)
    assert not any(f"layers.1.{part}" in name for name in names for part in mixed.values())
    assert bool(names) == (policy != "dequantize")
    state = published_state(model)
    expected = plain[WHOLE + "layers.1.self_attn.k_proj.weight"].float()
    assert torch.equal(state["model.layers.1.self_attn.k_proj.weight"], expected)
    expected = plain[WHOLE + "layers.1.mlp.experts.3.down_proj.weight"].float()
    assert torch.equal(state["model.layers.1.mlp.experts.down_proj"][3], expected)


def test_bfloat16_weights_stay_under_every_policy(wide, tmp_path):
    folder = wide.write(tmp_path)
    for policy in QUANTIZATIONS:
        assert_same(published_state(load_as(policy, folder, None)), wide.parameters())


KINDS = ["linear_attention", "full_attention"] * 2


@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_scanned_layers(tmp_path, row, policy):
    """Stacks of FP8 weights and of their scales hold what the layers hold, and give the same logits."""
    folder = quantized(random_checkpoint(wide_config(layer_types=KINDS))).write(tmp_path)
    plain, scanned = (
        load(folder, dtype="float32", runtime=RuntimeConfig(quantization=policy, scan_layers=scan)) for scan in (False, True)
    )
    names = fp8_names(scanned)
    assert all(":" in name for name in names) and 2 * len(names) == len(fp8_names(plain))
    assert len(names) == (0 if policy == "dequantize" else 12)
    assert_same_numbers(published_state(scanned), published_state(plain))
    # Logits of up to three, from graphs that round in different places.
    torch.testing.assert_close(scanned(**padded([row])).logits.cpu(), plain(**padded([row])).logits.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", ["keep", "channel"])
def test_a_stack_has_one_precision(tmp_path, policy):
    """A matrix that is BF16 in one of its layers is the model's dtype in all of them."""
    plain = random_checkpoint(wide_config(layer_types=KINDS))
    name = WHOLE + "layers.3.self_attn.o_proj.weight"

    def change(tensors):
        tensors[name] = plain.tensors[name]
        del tensors[name + "_scale_inv"]

    folder = quantized(plain).write(tmp_path, change=change)
    model = load(folder, dtype="float32", runtime=RuntimeConfig(quantization=policy, scan_layers=True))
    names = fp8_names(model)
    assert names and not any("o_proj" in name for name in names)
    state = published_state(model)
    assert torch.equal(state["model.layers.3.self_attn.o_proj.weight"], plain.tensors[name].float())


def test_state_dict_goes_back_in(wide_folder, row, logits):
    model = load_as("keep", wide_folder)
    model.load_state_dict(published_state(model))
    torch.testing.assert_close(model(**padded([row])).logits[0].cpu(), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["fp8", "", "KEEP", 8])
def test_no_such_policy(policy):
    with pytest.raises(ValueError, match="quantization must be one of keep, channel, dequantize"):
        RuntimeConfig(quantization=policy)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 300), (3, 7)], ids=str)
def test_blocks_quantized_twice_are_the_same(shape):
    """To the bit, through BF16 too: saving what was loaded changes nothing."""
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-8, 2, shape[1])
    numbers, scale = quantize_blocks(weight)
    for dtype in (torch.float32, torch.bfloat16):
        first, first_scale = quantize_blocks(dequantize(numbers, scale).to(dtype))
        again, again_scale = quantize_blocks(dequantize(first, first_scale).to(dtype))
        assert torch.equal(first.float(), again.float()) and torch.equal(first_scale, again_scale)


def ragged(shape) -> tuple[torch.Tensor, torch.Tensor]:
    """All FP8 numbers that are finite, in turn, and a scale of its own for each block."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].repeat(-(-shape[0] * shape[1] // 254))[: shape[0] * shape[1]].view(FP8)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.01
    return numbers.view(shape), scale


RAGGED = pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 129), (3, 300), (300, 5)], ids=str)


@RAGGED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantized_to_the_bit(shape, dtype):
    """As PyTorch converts and an independent loop over blocks scales."""
    weight, scale = ragged(shape)
    assert torch.equal(fp8.dequantize(weight, scale, dtype), dequantize(weight, scale).to(dtype))


def test_numbers_that_are_none_stay_none():
    """Those of parts that are only carried are not checked; they may not become numbers as they are widened."""
    weight, scale = ragged((70, 130))
    weight.view(torch.uint8)[[0, 69], [5, 129]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    result = fp8.dequantize(weight, scale)
    assert result.isnan().nonzero().tolist() == [[0, 5], [69, 129]]
    torch.testing.assert_close(result, dequantize(weight, scale), atol=0, rtol=0, equal_nan=True)


@RAGGED
def test_requantized_by_the_formula(shape):
    """The largest of each output channel becomes the largest FP8 number; the error is that of the rounding."""
    weight, scale = ragged(shape)
    wide = dequantize(weight, scale)
    channel = wide.abs().amax(dim=1) / 448
    channel = torch.where(channel > 0, channel, 1.0)
    expected = (wide / channel[:, None]).clamp(-448, 448).to(FP8)
    result, scales, squares = fp8.requantize_channels(weight, scale)
    assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scales, channel)
    error = wide - expected.float() * channel[:, None]
    wanted = torch.stack([error.square().sum(), wide.square().sum()]).double()
    torch.testing.assert_close(squares, wanted, rtol=1e-4, atol=1e-9)


def test_zero_rows_and_blocks():
    weight = torch.zeros(130, 140)
    for quantized_weight, scale, *_ in (quantize_blocks(weight), requantize_channels(weight.to(FP8), torch.ones(2, 2))):
        assert not quantized_weight.float().any() and (scale == 1).all()
