"""Rows of a tile in shards and in whole sequences."""

import pytest
import torch

from megatron_memo.tiles.grid import Grid


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_tile_of_the_whole_sequence_is_the_tiles_of_all_shards_in_order(shards):
    grid = Grid(rows=6, shards=shards)
    full = torch.randn(6 * shards, 2, 3)
    expected = torch.cat([shard[2:5] for shard in full.chunk(shards)])
    assert torch.equal(grid.take(full, 2, 5), expected)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_what_is_put_tile_by_tile_is_what_was_taken(shards):
    grid = Grid(rows=7, shards=shards)
    full = torch.randn(7 * shards, 2, 3)
    again = grid.empty(full)
    for start, stop in ((0, 2), (2, 3), (3, 7)):
        grid.put(again, grid.take(full, start, stop), start, stop)
    assert torch.equal(again, full)


def test_rows_of_one_shard_are_a_view_and_not_a_copy():
    full = torch.randn(6, 2, 3)
    assert Grid(rows=6).take(full, 1, 4).data_ptr() == full[1].data_ptr()
    assert Grid(rows=3, shards=2).take(full, 0, 3) is full
