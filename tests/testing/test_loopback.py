"""What the collectives of a loopback world do, in this one process."""

import pytest
import torch
import torch.distributed as dist

from megatron_memo.errors import UnsupportedError
from megatron_memo.testing import loopback

SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def world():
    loopback.init(SIZE)
    yield
    dist.destroy_process_group()


def test_the_world_has_the_asked_size_and_this_is_rank_0():
    assert (dist.get_rank(), dist.get_world_size()) == (0, SIZE)


def test_all_gather_repeats_this_ranks_rows():
    mine = torch.randn(2, 3, dtype=torch.float64)
    gathered = torch.empty(2 * SIZE, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered, mine.repeat(SIZE, 1))
    parts = [torch.empty(2, 3, dtype=torch.float64) for _ in range(SIZE)]
    dist.all_gather(parts, mine)
    assert all(torch.equal(part, mine) for part in parts)


def test_all_gather_takes_rows_that_are_not_contiguous():
    mine = torch.randn(3, 2).t()
    gathered = torch.empty(2 * SIZE, 3)
    dist.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered, mine.repeat(SIZE, 1))


def test_reduce_scatter_takes_this_ranks_slice():
    full = torch.randn(2 * SIZE, 3)
    mine = torch.empty(2, 3)
    dist.reduce_scatter_tensor(mine, full)
    assert torch.equal(mine, full[:2])


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG])
def test_all_reduce_is_the_identity(op):
    value = torch.randn(5).bfloat16()
    before = value.clone()
    dist.all_reduce(value, op=op)
    assert torch.equal(value, before)


def test_gathering_what_was_scattered_keeps_the_scale():
    """A sequence-parallel pair, reduce-scatter then all-gather, must not grow the data."""
    full = torch.randn(8, 3)
    shard = torch.empty(2, 3)
    dist.reduce_scatter_tensor(shard, full)
    again = torch.empty(8, 3)
    dist.all_gather_into_tensor(again, shard)
    assert torch.equal(again, full[:2].repeat(SIZE, 1))


def test_all_to_all_gives_this_ranks_slice_from_each_peer():
    full = torch.arange(2.0 * SIZE).view(-1, 1)
    received = torch.empty_like(full)
    dist.all_to_all_single(received, full)
    assert torch.equal(received, full[:2].repeat(SIZE, 1))


def test_all_to_all_with_splits_that_equal_peers_could_not_have_is_refused():
    with pytest.raises(UnsupportedError, match=r"expected output splits \[3, 3, 3, 3\], found \[2, 2, 2, 2\]"):
        dist.all_to_all_single(torch.empty(8, 1), torch.empty(6, 1), [2] * SIZE, [3, 1, 1, 1])


def test_broadcast_keeps_this_ranks_data():
    value = torch.randn(3)
    before = value.clone()
    dist.broadcast(value, 0)
    assert torch.equal(value, before)


def test_a_message_that_nobody_sends_is_refused():
    dist.send(torch.ones(1), 1)
    with pytest.raises(UnsupportedError, match="recv from rank 2"):
        dist.recv(torch.ones(1), 2)


def test_groups_made_later_are_loopback_too_and_asynchronous_work_can_be_waited_for():
    group = dist.new_group([0, 1])
    gathered = torch.empty(4)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]), group=group, async_op=True).wait()
    assert gathered.tolist() == [1.0, 2.0, 1.0, 2.0]
    assert dist.new_group([1, 2]) is dist.GroupMember.NON_GROUP_MEMBER
