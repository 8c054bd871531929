"""Tiles cover the rows, and the fractions are exact to a row."""

import itertools

import pytest

from megatron_memo.policy.tiles import Action, LayerPolicy

CASES = list(itertools.product([1, 2, 7, 64, 1001], [1, 2, 3, 16, 2000], [(0, 0), (1, 0), (0, 1), (0.25, 0), (0.3, 0.3), (0.001, 0.5)]))


@pytest.mark.parametrize("rows, tiles, fractions", CASES)
def test_tiles_cover_all_rows_once_and_in_order(rows, tiles, fractions):
    cut = LayerPolicy(*fractions, tiles).cut(rows)
    assert [tile.start for tile in cut] == [0, *(tile.stop for tile in cut[:-1])]
    assert cut[-1].stop == rows
    assert all(tile.start < tile.stop for tile in cut)


@pytest.mark.parametrize("rows, tiles, fractions", CASES)
def test_no_tile_is_longer_than_an_even_share(rows, tiles, fractions):
    cut = LayerPolicy(*fractions, tiles).cut(rows)
    assert max(tile.stop - tile.start for tile in cut) <= -(-rows // min(rows, tiles))
    assert len(cut) <= min(rows, tiles) + 2


@pytest.mark.parametrize("rows, tiles, fractions", CASES)
def test_fractions_are_exact_to_a_row(rows, tiles, fractions):
    cut = LayerPolicy(*fractions, tiles).cut(rows)
    for action, fraction in ((Action.SWAP, fractions[0]), (Action.KEEP, fractions[1])):
        assert abs(sum(tile.stop - tile.start for tile in cut if tile.action is action) - fraction * rows) <= 1


def test_a_resident_layer_swaps_nothing():
    cut = LayerPolicy(0.5, 0.1, 8, resident=True).cut(64)
    assert {tile.action for tile in cut} == {Action.KEEP, Action.RECOMPUTE}
    assert sum(tile.stop - tile.start for tile in cut if tile.action is Action.KEEP) == 38


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="at least one token row"):
        LayerPolicy(0, 0, 1).cut(0)
