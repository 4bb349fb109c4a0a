"""What depends on data: turns of loops, turns and bytes of kernels."""

from __future__ import annotations

import dataclasses

import pytest
from support import moe_config

from custom_ops.ragged_moe import schedule_cases
from custom_ops.ragged_moe.pallas_plan import plan
from custom_ops.ragged_paged_attention.pallas_layout import PREFILL_BLOCK, tile_of
from custom_ops.schedule.bundles import Loop
from torchqwen_tpu.planning.hlo import Array, Instruction
from torchqwen_tpu.planning.kernels import Kernels
from torchqwen_tpu.planning.load import Expectations, Load

DECODE = Load(8, 8200, ranks=8, devices=8, decode_graph=True)
SIZES_397B = {
    "num_experts": 512, "num_experts_per_tok": 10, "hidden_size": 4096, "moe_intermediate_size": 1024,
    "linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
UNKNOWN, OUTER = Loop(10, 20, own=10, steps=None), Loop(0, 30, own=20, steps=None, inner=[Loop(1, 2, own=2, steps=1)])


def expected(load: Load, rows: int = 8, slots: int = 8, passes: int | None = None) -> Expectations:
    return Expectations(moe_config(**SIZES_397B), load, rows, slots, page_size=256, passes=passes)


def kernels(load: Load, rows: int = 8, fp8: bool = True) -> Kernels:
    return Kernels(moe_config(**SIZES_397B), load, rows, fp8, head_shards=1, state_bytes=2, chips=4)


def loop(name: str) -> Instruction:
    return Instruction("loop", "while", "()", (), f', metadata={{op_name="call.1/{name}"}}', "")


def test_experts_that_64_tokens_hit():
    assert 512 * expected(DECODE).experts_hit() == pytest.approx(367, abs=1)
    assert 8 * kernels(DECODE).experts.hit == pytest.approx(367, abs=1)


def test_xla_takes_every_pair_as_a_tile_while_an_expert_sees_few_tokens():
    experts = loop("jit(ragged_moe)/while")
    assert expected(DECODE).turns(experts, ()) == 80
    assert expected(DECODE, passes=1).turns(experts, ()) == 0


def test_pages_of_a_decoding_sequence():
    attention = "jit(ragged_paged_attention)/ragged_paged_attention/while"
    assert expected(DECODE).turns(loop(attention), ()) == 8
    assert expected(DECODE).turns(loop(f"{attention}/body/while"), ()) == 33


def test_blocks_of_a_prompt_in_tiles_of_queries():
    load = Load(0, 0, prefill=4096, prefill_context=2048, ranks=8, devices=8)
    attention = "jit(ragged_paged_attention)/ragged_paged_attention/while"
    assert expected(load, rows=4096).turns(loop(attention), ()) == 4096 // 128
    # The mean query sees 4,096 positions, in blocks of 256; two loops share them.
    assert 2 * expected(load, rows=4096).turns(loop(f"{attention}/body/while"), ()) == pytest.approx(16.5)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_kernels_of_the_experts_agree_with_their_schedule_cases(tokens):
    load = Load(tokens // 8, 100, ranks=8, devices=8, decode_graph=True)
    known = kernels(load, rows=tokens // 8)
    shape = known.experts.shape
    assert shape == schedule_cases.shape_of(shape.rows)
    hit, row = schedule_cases.hit_experts(shape.rows), 2 * 4096
    least = hit * shape.weight_bytes + 2 * row * shape.mean_pairs
    assert known.bytes("ragged_moe_experts.3") == pytest.approx(least, rel=0.01)
    items = known.turns("ragged_moe_experts.3", OUTER)
    assert 0.99 * hit <= items <= plan(shape).items
    assert known.turns("ragged_moe_experts.3", UNKNOWN) >= 1
    assert known.turns("ragged_moe_combine", UNKNOWN) >= 1
    assert known.turns("ragged_moe_experts", Loop(0, 5, own=5, steps=4)) is None


def test_passes_over_the_experts_share_their_work():
    load = Load(1024, 100, ranks=8, devices=8, decode_graph=True)
    known = kernels(load, rows=1024)
    assert known.experts.passes == 2
    assert expected(load, rows=1024, passes=2).turns(loop("jit(ragged_moe)/while"), ()) == 1
    whole = dataclasses.replace(known.experts, passes=1)
    for name, again in (("ragged_moe_experts", 0.01), ("ragged_moe_combine", 1)):
        assert 1 <= 2 * known.bytes(name) / whole.bytes(name) < 1 + again
    assert 2 * known.turns("ragged_moe_experts", OUTER) == pytest.approx(whole.turns("ragged_moe_experts", OUTER))
    assert known.turns("ragged_moe_experts", UNKNOWN) == whole.turns("ragged_moe_experts", UNKNOWN)


def test_an_empty_graph_takes_less_than_a_full_one():
    full, part = (kernels(Load(rows, 100, ranks=8, devices=8), rows=512) for rows in (512, 8))
    for name in ("ragged_moe_experts", "ragged_moe_combine", "gated_delta_net_decode"):
        assert part.bytes(name) < full.bytes(name)
    assert part.turns("ragged_moe_experts", OUTER) < full.turns("ragged_moe_experts", OUTER)


def test_kernels_of_gated_delta_net():
    known = kernels(DECODE)
    assert known.turns("gated_delta_net_decode.2", UNKNOWN) == 1
    assert known.turns("gated_delta_net_decode.2", Loop(0, 9, own=9, steps=64)) == 0
    states = 8 * 2 * 64 * 128 * 128 * 2
    assert states < known.bytes("gated_delta_net_decode.2") < 1.1 * states
    prompt = kernels(Load(0, 0, prefill=1000, ranks=8, devices=8), rows=1024)
    assert prompt.turns("gated_delta_net_chunk", UNKNOWN) == 16


@pytest.mark.parametrize("kv_dtype, bytes_a_token", [("bfloat16", 2048), ("float8_e4m3fn", 1040)])
def test_kernels_of_attention(kv_dtype, bytes_a_token):
    """Loops as `custom_ops.ragged_paged_attention` has them: over sequences or tiles, over blocks, over pages."""
    config = moe_config(**SIZES_397B, num_attention_heads=32, num_key_value_heads=2, head_dim=256)
    blocks = Loop(3, 20, own=10, steps=None, inner=[UNKNOWN])
    readers = Loop(0, 40, own=20, steps=None, inner=[blocks, UNKNOWN])

    def known(load, rows):
        return Kernels(config, load, rows, True, 1, 2, 4, page_size=256, kv_dtype=kv_dtype)

    decode = known(DECODE, 8)
    turns = [decode.turns("attention_decode.7", entry) for entry in (readers, blocks, UNKNOWN)]
    assert turns == [8, 8, 4]
    assert decode.bytes("attention_decode.7") == pytest.approx(8 * 8200 * bytes_a_token, rel=0.02)
    assert decode.bytes("attention_prefill") == 0
    prompt = known(Load(0, 0, prefill=1024, prefill_context=2048, ranks=8, devices=8), 1024)
    masked = Loop(3, 20, own=10, steps=None, inner=[UNKNOWN, UNKNOWN])
    assert prompt.turns("attention_prefill", readers) == 1024 / tile_of(1024)
    assert prompt.turns("attention_prefill", blocks) == 2560 // PREFILL_BLOCK
    assert 1 < prompt.turns("attention_prefill", masked) < 2
    assert prompt.turns("attention_write", UNKNOWN) == 5
    assert prompt.bytes("attention_write") > 2 * 1024 * bytes_a_token


def test_the_reduce_scatter_is_modelled_by_its_own_cost():
    operand = Array("bf16", (4, 2, 8, 4096), 4 * 2 * 8 * 4096 * 2, True)
    assert 3e-6 < kernels(DECODE).seconds("reduce_scatter", operand) < 30e-6
    assert kernels(DECODE).seconds("gated_delta_net_decode", operand) is None


def test_the_all_gather_is_modelled_by_its_own_cost():
    gathered = Array("f8e4m3fn", (4, 2, 1024, 4224), 8192 * 4224, True)
    assert 144e-6 < kernels(DECODE).seconds("all_gather", gathered) < 200e-6


def test_operations_that_nothing_is_known_of():
    assert expected(Load(8, 8192)).turns(loop("jit(sort)/while"), ()) is None
    assert kernels(DECODE).bytes("some_kernel") is None and kernels(DECODE).turns("some_kernel", UNKNOWN) is None
