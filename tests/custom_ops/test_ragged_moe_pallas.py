"""Local experts in Pallas: in the interpreter against the reference, their index algebra, and compiled for Ironwood."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import compiled, relative_error
from moe_experts_cases import routing, rows_of, weights
from test_ragged_moe_experts import LOADS, check

from custom_ops.implementations import implementation
from custom_ops.ragged_moe import pallas_plan, pallas_tpu, reference, xla
from custom_ops.ragged_moe.pallas_plan import GROUP, ExpertsShape, Plan, plan, supports
from custom_ops.ragged_moe.pallas_rows import receive
from custom_ops.ragged_moe.pallas_send import send
from custom_ops.ragged_moe.pallas_work import BLOCK_ROWS, UNUSED, work_of_pass
from custom_ops.ragged_moe.routing import route
from custom_ops.ragged_moe.wire import Tokens, from_wire, pack, to_wire, unpack
from custom_ops.tpu_compiler import compile_jax

EXPERTS, LOCAL, TOP_K = 8, 4, 3
HIDDEN, WIDTH = 256, 128
PUBLISHED = {
    "397B": ExpertsShape(8192, 10, 64, 512, 4096, 1024),
    "122B": ExpertsShape(8192, 8, 32, 256, 3072, 1024),
    "35B": ExpertsShape(8192, 8, 32, 256, 2048, 512),
}
"""On eight cores, with weights in BF16."""
VMEM = 64 * 2**20
ROUNDED_ROWS = 6e-3
"""FP32 rows are rounded to BF16 first, which the reference does not do."""

interpreted = functools.partial(pallas_tpu.experts, interpret=True)


@pytest.fixture
def small_memory(monkeypatch):
    """Sets sizes of `pallas_plan` for one test."""

    def setter(**sizes):
        for name, size in sizes.items():
            monkeypatch.setattr(pallas_plan, name, size)
        plan.cache_clear()

    yield setter
    plan.cache_clear()


@pytest.mark.parametrize(
    ("rows", "form", "rows_dtype"),
    [
        (1, "bfloat16", "float32"),
        (8, "fp8 by channel", "bfloat16"),
        (64, "fp8 by channel", "float8_e4m3fn"),
        (64, "fp8 by block", "float8_e4m3fn"),
        (200, "bfloat16", "bfloat16"),
        pytest.param(1000, "fp8 by channel", "float8_e4m3fn", marks=pytest.mark.long),
    ],
)
def test_formats_and_loads(rows, form, rows_dtype):
    """Every load in turn: they share a compilation."""
    local = weights(LOCAL, HIDDEN, WIDTH, form)
    for load in LOADS:
        expert, weight = routing(load, rows, TOP_K, EXPERTS, LOCAL)
        at_most = ROUNDED_ROWS if (form, rows_dtype) == ("bfloat16", "float32") else None
        check(interpreted, *rows_of(rows, HIDDEN, rows_dtype), expert, weight, local, EXPERTS, at_most)


@pytest.mark.parametrize("form", ["bfloat16", "fp8 by channel", "fp8 by block"])
def test_int8_rows_are_what_their_scales_make_of_them(form):
    """A row of four blocks, two scales in a word; rows that are padded to a tile."""
    rows, hidden = 70, 512
    values, local = rows_of(rows, hidden, "bfloat16")[0], weights(LOCAL, hidden, WIDTH, form)
    codes, scale = to_wire(values, jnp.dtype("int8"))
    expert, weight = routing("skewed", rows, TOP_K, EXPERTS, LOCAL)
    run = jax.jit(functools.partial(interpreted, num_experts=EXPERTS))
    result = run(codes, expert, weight, *local, row_scale=scale)
    back, _ = from_wire(codes, scale, jnp.bfloat16)
    for rows, most in ((back, 4e-3), (values, 1.2e-2)):
        assert relative_error(result, reference.experts(rows, expert, weight, *local, num_experts=EXPERTS)) <= most


@pytest.mark.parametrize("form", [pytest.param("fp8 by channel", marks=pytest.mark.slow), "fp8 by block"])
def test_chunks_go_round_the_ring(small_memory, form):
    """Experts of three chunks, more of them than there are slots; a row of 768 columns does not fill its tiles of memory."""
    small_memory(CHUNK_BYTES=1)
    experts, hidden, width = 8, 768, 384
    expert, weight = routing("skewed", 40, TOP_K, experts, experts)
    sizes = plan(ExpertsShape(40, TOP_K, experts, experts, hidden, width, "float8_e4m3fn", form.split()[-1]))
    assert sizes.chunks == 3 and sizes.slots < experts * sizes.chunks and sizes.pitch > sizes.words
    local = weights(experts, hidden, width, form)
    check(interpreted, *rows_of(40, hidden, "bfloat16"), expert, weight, local, experts)


@pytest.mark.parametrize("form", ["bfloat16", "fp8 by channel", "fp8 by block"])
@pytest.mark.parametrize("experts", [reference.experts, xla.experts, interpreted], ids=["reference", "xla", "pallas"])
def test_a_layer_of_stacks_is_that_layer(experts, form):
    layers = [weights(LOCAL, HIDDEN, WIDTH, form, seed) for seed in range(3)]
    stacks = [None if parts[0] is None else jnp.stack(parts) for parts in zip(*layers, strict=True)]
    expert, weight = routing("uniform", 16, TOP_K, EXPERTS, LOCAL)
    rows, _ = rows_of(16, HIDDEN, "bfloat16")
    run = jax.jit(functools.partial(experts, num_experts=EXPERTS))
    for number in (0, 2):
        alone = run(rows, expert, weight, *layers[number])
        np.testing.assert_array_equal(run(rows, expert, weight, *stacks, layer=jnp.int32(number)), alone)


def test_more_pairs_than_a_pass_takes(small_memory):
    """Three passes, whose borders lie within an expert, where the mean load asked for one."""
    small_memory(PAIR_BYTES=1)
    rows, experts = 120, 64
    local = weights(LOCAL, HIDDEN, WIDTH, "bfloat16")
    sizes = plan(ExpertsShape(rows, TOP_K, LOCAL, experts, HIDDEN, WIDTH))
    assert sizes.pairs == 128 and sizes.passes == 3
    for load in ("uniform", "one expert", "no local expert"):
        expert, weight = routing(load, rows, TOP_K, LOCAL + 1 if load == "uniform" else experts, LOCAL)
        check(interpreted, *rows_of(rows, HIDDEN, "float32"), expert, weight, local, experts, ROUNDED_ROWS)


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone():
    local, (rows, scale) = weights(LOCAL, HIDDEN, WIDTH, "fp8 by channel"), rows_of(64, HIDDEN, "float8_e4m3fn")
    expert, weight = routing("uniform", 64, TOP_K, EXPERTS, LOCAL)
    expert[9] = 0, LOCAL, LOCAL
    broken = np.array(scale)
    broken[9] = np.nan
    run = jax.jit(functools.partial(interpreted, num_experts=EXPERTS))
    sound, result = (np.asarray(run(rows, expert, weight, *local, row_scale=part), np.float32) for part in (scale, broken))
    assert np.isnan(result[9]).all()
    np.testing.assert_array_equal(np.delete(result, 9, 0), np.delete(sound, 9, 0))


@pytest.mark.parametrize(("wire", "at_most"), [("int8", 1.2e-2), ("float8_e4m3fn", 4e-2)])
def test_the_whole_layer_through_the_one_place_that_chooses(wire, at_most):
    rng = np.random.default_rng(0)
    gate_up, down, gate_up_scale, down_scale = weights(EXPERTS, HIDDEN, WIDTH, "fp8 by channel")
    hidden = jnp.asarray(rng.standard_normal((8, HIDDEN)), jnp.bfloat16)
    logits, valid = rng.standard_normal((8, EXPERTS)).astype(np.float32), np.arange(8) != 3
    args = (hidden, logits, valid, gate_up, down, gate_up_scale, down_scale)
    result = compiled("ragged_moe", "pallas_tpu", top_k=TOP_K, wire=wire)(*args)
    expected = compiled("ragged_moe", "reference", top_k=TOP_K)(*args)
    assert relative_error(result, expected) <= at_most and not np.asarray(result[3], np.float32).any()


def test_the_choice_goes_by_the_arguments():
    hidden, logits, valid = jnp.zeros((8, 32)), jnp.zeros((8, EXPERTS)), jnp.ones(8, bool)
    narrow = weights(EXPERTS, 32, 8, "bfloat16")
    chosen = functools.partial(implementation("ragged_moe", "tpu"), top_k=2)
    assert jax.eval_shape(chosen, hidden, logits, valid, *narrow[:2]).shape == (8, 32)
    with pytest.raises(ValueError, match="pallas_tpu.*width=8"):
        implementation("ragged_moe", "cpu", "pallas_tpu")(hidden, logits, valid, *narrow[:2], top_k=2)


@functools.cache
def grouped(sizes: Plan, first_expert: int):
    """The work of a pass, from experts as they travel."""

    @jax.jit
    def run(expert, weight, number):
        tokens = Tokens(jnp.zeros((len(expert), HIDDEN), jnp.bfloat16), None, expert, weight)
        _, routing = receive(pack(tokens), hidden=HIDDEN, top_k=TOP_K, interpret=True)
        return work_of_pass(routing, first_expert, number, sizes, interpret=True)

    return run


@pytest.mark.parametrize(
    ("rows", "pairs", "first_expert"), [(1, 128, 0), (50, 128, 0), (120, 128, 5), (120, 384, 0), (300, 256, 2)]
)
def test_work_covers_every_pair_once(rows, pairs, first_expert):
    """Items, tokens and places of all passes, against the pairs counted one by one."""
    sizes = dataclasses.replace(plan(ExpertsShape(rows, TOP_K, LOCAL, EXPERTS, HIDDEN, WIDTH)), tile=16, pairs=pairs)
    for load in LOADS:
        expert, weight = routing(load, rows, TOP_K, EXPERTS, LOCAL)
        check_work(expert, weight, sizes, first_expert)


def check_work(expert, weight, sizes: Plan, first_expert: int) -> None:
    rows, seen = len(expert), {}
    elsewhere = np.where(expert < LOCAL, first_expert + expert, (first_expert + LOCAL) % EXPERTS)
    for number in range(sizes.passes):
        work = jax.tree.map(np.asarray, grouped(sizes, first_expert)(elsewhere, weight, number))
        items, taking_part = work.totals
        assert work.pairs[0] == (expert < LOCAL).sum()
        row_of_place, weight_of_place = {}, {}
        for block, (start, end) in enumerate(itertools.pairwise(work.block_start)):
            row, bits = work.places[block, :2, : end - start]
            numbers = range(start, end)
            row_of_place |= zip(numbers, (row + block * BLOCK_ROWS).tolist(), strict=True)
            weight_of_place |= zip(numbers, bits.view(np.float32).tolist(), strict=True)
            assert (row >= 0).all() and (work.places[block, 0, end - start : -(-(end - start) // 128) * 128] == UNUSED).all()
        written, ordinal = set(), -1
        for item in range(items):
            first, last = work.item_first[item], work.item_last[item]
            ordinal += first
            assert work.item_expert[item] == ordinal and 0 < work.item_rows[item] <= sizes.tile
            assert last == (item + 1 == items or work.item_first[item + 1])
            for pair in range(work.item_start[item], work.item_start[item] + work.item_rows[item]):
                key, place = (int(work.token[pair]), int(work.expert[ordinal])), int(work.place[pair])
                assert key not in seen and place not in written and row_of_place[place] == key[0]
                seen[key] = weight_of_place[place]
                written.add(place)
        assert ordinal + 1 == taking_part and sorted(written) == list(range(len(row_of_place))) == sorted(row_of_place)
        assert work.block_start[0] == 0 and (0 <= work.token[: len(written) + GROUP]).all() and work.token.max() < rows + GROUP
    local = np.argwhere(expert < LOCAL)
    assert seen == {(row, expert[row, choice]): weight[row, choice] for row, choice in local}


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8", "bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(3, 8, 3), (70, 32, 10)])
def test_what_is_sent_is_what_xla_sends(wire, tokens, experts, top_k):
    """Routing with many ties, rows that are no token, and values that are not finite."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    logits = np.round(3 * rng.standard_normal((tokens, experts))).astype(np.float32) / 3
    hidden[1, 5], hidden[2, 7], logits[0, 3], logits[-1, 2] = np.nan, np.inf, np.inf, np.nan
    hidden, valid = jnp.asarray(hidden, jnp.bfloat16), np.arange(tokens) % 5 != 4
    for rounded in (False, True):
        run = functools.partial(send, top_k=top_k, round_weights=rounded, wire=wire, interpret=True)
        expert, weight = route(logits, valid, top_k=top_k)
        weight = weight.astype(jnp.bfloat16).astype(jnp.float32) if rounded else weight
        expected = Tokens(*to_wire(hidden, jnp.dtype(wire)), expert, weight)
        result = unpack(jax.jit(run)(hidden, logits, valid), hidden=HIDDEN, top_k=top_k)
        np.testing.assert_array_equal(result.expert, expert)
        np.testing.assert_allclose(result.weight, weight, rtol=1e-2 if rounded else 1e-6)
        values = []
        for part in (result, expected):
            rows, scale = from_wire(part.rows[:, :HIDDEN], part.row_scale, jnp.float32)
            values.append(np.asarray(rows.astype(jnp.float32) * (1 if scale is None else scale[:, None])))
        sound = np.isfinite(np.asarray(hidden, np.float32)).all(1)
        np.testing.assert_allclose(values[0][sound], values[1][sound], rtol=1e-6)
        assert not np.isfinite(values[0][~sound].sum(1)).any()


@pytest.mark.parametrize("scales", ["none", "channel", "block"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_sizes_fit(model, scales):
    dtype = "bfloat16" if scales == "none" else "float8_e4m3fn"
    whole = dataclasses.replace(PUBLISHED[model], weight_dtype=dtype, scales=scales)
    tiles = []
    for rows in (1, 8, 64, 512, 1024, 2048, 4096, 8192):
        sizes = plan(dataclasses.replace(whole, rows=rows))
        assert sizes.chunks < sizes.slots and sizes.chunk * sizes.chunks == whole.width
        weights_of_ring = sizes.slots * whole.weight_bytes // sizes.chunks
        of_rows = sizes.tile * whole.hidden * (2 + 4) + 4 * sizes.tile * sizes.pitch * 128 * 4
        assert weights_of_ring + of_rows < VMEM - 6 * 2**20
        assert sizes.pairs >= min(whole.mean_pairs * rows / 8192, 128)
        tiles.append(sizes.tile)
    assert tiles[0] == 16 and tiles[:6] == sorted(tiles[:6]) and tiles[-1] >= 128


def test_sizes_that_do_not_fit_are_refused():
    shape = PUBLISHED["397B"]
    assert supports(shape)
    for change in ({"hidden": 4000}, {"width": 1000}, {"weight_dtype": "float32"}, {"width": 8192}):
        assert not supports(dataclasses.replace(shape, **change))
    with pytest.raises(ValueError, match="multiples of 256.*width=72"):
        expert, weight = routing("uniform", 4, TOP_K, EXPERTS, EXPERTS)
        interpreted(rows_of(4, 256, "bfloat16")[0], expert, weight, *weights(EXPERTS, 256, 72, "bfloat16"), num_experts=EXPERTS)


def compiled_for_ironwood(shape: ExpertsShape, rows_dtype: str):
    def array(size, dtype="float32"):
        return jax.ShapeDtypeStruct(size, dtype)

    experts, hidden, width = shape.experts, shape.hidden, shape.width
    pairs = (shape.rows, shape.top_k)
    arguments = [
        array((shape.rows, hidden), rows_dtype), array(pairs, "int32"), array(pairs),
        array((experts, 2 * width, hidden), shape.weight_dtype), array((experts, hidden, width), shape.weight_dtype),
    ]  # fmt: skip
    if shape.scales == "channel":
        arguments += [array((experts, 2 * width)), array((experts, hidden))]
    elif shape.scales == "block":
        arguments += [array((experts, 2 * width // 128, hidden // 128)), array((experts, hidden // 128, width // 128))]
    return compile_jax(functools.partial(pallas_tpu.experts, num_experts=shape.num_experts), *arguments)


def test_decode_at_397b_compiles_for_ironwood():
    shape = dataclasses.replace(PUBLISHED["397B"], rows=64, weight_dtype="float8_e4m3fn", scales="channel")
    program = compiled_for_ironwood(shape, "bfloat16")
    assert "ragged_moe_experts" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 16 * 2**20


@pytest.mark.long
@pytest.mark.parametrize("scales", ["none", "channel", "block"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_prefill_at_published_sizes_compiles_for_ironwood(model, scales):
    """With room for bounded results only: a step of 8,192 tokens takes less than 256 MiB beside its sums."""
    dtype = "bfloat16" if scales == "none" else "float8_e4m3fn"
    program = compiled_for_ironwood(dataclasses.replace(PUBLISHED[model], weight_dtype=dtype, scales=scales), "bfloat16")
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20


@pytest.mark.long
@pytest.mark.parametrize("form", ["bfloat16", "fp8 by channel", "fp8 by block"])
def test_397b_on_four_of_its_experts(form):
    """At the real sizes, of which memory forbids all 512 experts."""
    local = weights(4, 4096, 1024, form)
    for load in ("uniform", "one expert"):
        expert, weight = routing(load, 64, 2, 8, 4)
        check(interpreted, *rows_of(64, 4096, "bfloat16"), expert, weight, local, 8)
