"""How context parallelism cuts a sequence. The check over several ranks runs in tests/hooks/parallel_worker.py."""

import pytest
import torch

from megatron_memo.attention.context import rows_of


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_hold_every_row_once_and_each_as_much_of_a_causal_mask(ranks):
    parts = [rows_of(rank, ranks, 16 * ranks) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(16 * ranks))
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_a_rank_holds_a_piece_from_the_front_and_one_from_the_back():
    assert rows_of(0, 2, 8).tolist() == [0, 1, 6, 7]
    assert rows_of(1, 2, 8).tolist() == [2, 3, 4, 5]
