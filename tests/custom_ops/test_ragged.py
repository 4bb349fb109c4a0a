"""Index algebra of ragged batches: sequences cut into tiles, and rows told apart."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from custom_ops.ragged import tile_sequences, token_sequence

TOKENS = 64
LAYOUTS = {
    "nothing": ([0, 0, 0], [0, 0, 0]),
    "one row": ([0, 0, 63], [0, 0, 1]),
    "one sequence takes all": ([0, 0, 64], [0, 64, 0]),
    "whole tiles": ([0, 16, 24], [16, 8, 40]),
    "partial tiles": ([0, 1, 10], [1, 9, 17]),
    "gaps, and in no order": ([40, 2, 20], [9, 7, 0]),
    "empty ones share a start": ([5, 5, 5], [0, 11, 0]),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request):
    return tuple(np.array(part, np.int32) for part in request.param)


@functools.cache
def tiles_of(tile: int):
    return jax.jit(functools.partial(tile_sequences, tokens=TOKENS, tile=tile))


@pytest.mark.parametrize("tile", [1, 8, 128])
def test_tiles_cover_every_row_of_every_sequence_once(layout, tile):
    start, length = layout
    tiles = tiles_of(tile)(start, length)
    expected = [
        (sequence, offset, min(length[sequence] - offset, tile))
        for sequence in range(len(start))
        for offset in range(0, length[sequence], tile)
    ]
    assert int(tiles.count) == len(expected)
    for index, (sequence, offset, rows) in enumerate(expected):
        assert (tiles.sequence[index], tiles.start[index], tiles.offset[index]) == (sequence, start[sequence], offset)
        np.testing.assert_array_equal(tiles.valid[index], np.arange(tile) < rows)
        np.testing.assert_array_equal(tiles.row[index][:rows], start[sequence] + offset + np.arange(rows))
    assert not np.asarray(tiles.valid)[len(expected) :].any()
    assert np.all((np.asarray(tiles.row) >= 0) & (np.asarray(tiles.row) < TOKENS))


@pytest.mark.parametrize("tile", [1, 8, 128])
def test_scatter_undoes_gather_and_leaves_zero_elsewhere(layout, tile):
    start, length = layout
    rows = np.random.default_rng(0).standard_normal((TOKENS, 3)).astype(np.float32)
    tiles = tiles_of(tile)(start, length)
    gathered = np.asarray(tiles.gather(rows, np.nan))
    assert np.isnan(gathered[~np.asarray(tiles.valid)]).all()
    expected = np.zeros_like(rows)
    for first, count in zip(start, length, strict=True):
        expected[first : first + count] = rows[first : first + count]
    np.testing.assert_array_equal(tiles.scatter(gathered), expected)


def test_token_sequence(layout):
    start, length = layout
    sequence, position, inside = map(np.asarray, token_sequence(start, length, TOKENS))
    taken = np.zeros(TOKENS, bool)
    for number, (first, count) in enumerate(zip(start, length, strict=True)):
        rows = slice(first, first + count)
        taken[rows] = True
        assert (sequence[rows] == number).all()
        np.testing.assert_array_equal(position[rows], np.arange(count))
    np.testing.assert_array_equal(inside, taken)
