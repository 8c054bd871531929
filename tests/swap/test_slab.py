"""Blocks of the host slab."""

import pytest
import torch

from megatron_memo.errors import HostMemoryError
from megatron_memo.swap.slab import ALIGNMENT_BYTES, HostSlab, aligned


def slab(blocks):
    return HostSlab(torch.zeros(blocks * ALIGNMENT_BYTES, dtype=torch.uint8))


def test_sizes_are_rounded_up_to_the_alignment():
    assert [aligned(size) for size in (0, 1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1)] == [0, ALIGNMENT_BYTES, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES]


def test_blocks_do_not_overlap_and_can_fill_the_slab():
    memory = slab(4)
    places = [memory.take(ALIGNMENT_BYTES).place(7) for _ in range(4)]
    for index, place in enumerate(places):
        place.fill_(index + 1)
    assert [int(place[0]) for place in places] == [1, 2, 3, 4]
    assert memory.used_bytes == memory.peak_bytes == 4 * ALIGNMENT_BYTES


def test_a_full_slab_names_what_is_needed_and_what_is_there():
    memory = slab(2)
    memory.take(ALIGNMENT_BYTES)
    with pytest.raises(HostMemoryError, match="needs 1024 bytes, 512 of 1024 are in use and the longest free range has 512"):
        memory.take(2 * ALIGNMENT_BYTES)


def test_a_block_takes_no_more_than_was_measured():
    block = slab(4).take(2 * ALIGNMENT_BYTES)
    block.place(ALIGNMENT_BYTES + 1)
    with pytest.raises(HostMemoryError, match="its block has 1024 bytes, 1536 are needed"):
        block.place(1)


def test_neighbours_that_are_given_back_join():
    memory = slab(3)
    blocks = [memory.take(ALIGNMENT_BYTES) for _ in range(3)]
    for index in (0, 2, 1):
        blocks[index].give_back()
    assert memory.used_bytes == 0
    memory.take(3 * ALIGNMENT_BYTES)


def test_giving_back_twice_does_nothing():
    memory = slab(2)
    first = memory.take(ALIGNMENT_BYTES)
    memory.take(ALIGNMENT_BYTES)
    first.give_back()
    first.give_back()
    assert memory.used_bytes == ALIGNMENT_BYTES


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_a_joined_range_waits_for_its_newest_reader(order):
    memory = slab(3)
    blocks = [memory.take(ALIGNMENT_BYTES) for _ in range(3)]
    for number, index in enumerate(order):
        blocks[index].give_back(f"reader {number}")
    assert memory.take(3 * ALIGNMENT_BYTES).read_by == "reader 2"


def test_a_reader_outlives_a_block_that_nobody_has_read():
    memory = slab(1)
    memory.take(ALIGNMENT_BYTES).give_back("reader")
    memory.take(ALIGNMENT_BYTES).give_back()
    assert memory.take(ALIGNMENT_BYTES).read_by == "reader"
