"""Turns that depend on data, and the least that a step takes."""

from __future__ import annotations

import pytest
from support import moe_config

from torchqwen_tpu.planning.hlo import Instruction
from torchqwen_tpu.planning.load import Expectations, Load


def expected(load: Load, rows: int = 8, **changes) -> Expectations:
    config = moe_config(num_experts=512, num_experts_per_tok=10, **changes)
    return Expectations(config, load, rows, heads_shards=1, page_size=256, state_bytes=2, chips=4)


def loop(name: str) -> Instruction:
    return Instruction("loop", "while", "()", (), f', metadata={{op_name="call.1/{name}"}}', "")


def test_experts_that_64_tokens_hit():
    load = Load(8, 8192, ranks=8, devices=8, decode_graph=True)
    assert 512 * expected(load).experts_hit() == pytest.approx(367, abs=1)


def test_every_pair_is_a_tile_while_an_expert_sees_few_tokens():
    load = Load(8, 8192, ranks=8, devices=8, decode_graph=True)
    assert expected(load).turns(loop("jit(ragged_moe)/while"), ()) == 80


def test_pages_of_a_decoding_sequence():
    load = Load(8, 8200, ranks=8, devices=8, decode_graph=True)
    attention = "jit(ragged_paged_attention)/ragged_paged_attention/while"
    assert expected(load).turns(loop(attention), ()) == 8
    assert expected(load).turns(loop(f"{attention}/body/while"), ()) == 33


def test_operations_that_nothing_is_known_of():
    assert expected(Load(8, 8192)).turns(loop("jit(sort)/while"), ()) is None
    assert expected(Load(8, 8192)).kernel_bytes("some_kernel") is None
