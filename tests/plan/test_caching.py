"""The simulated caching allocator, on traces whose outcome follows from the rules by hand, and against invariants on random ones."""

import random

import pytest

from megatron_memo.plan.caching import MIB, CachingSettings, simulate
from megatron_memo.plan.records import Buffer

EXPANDABLE = CachingSettings(expandable=True)


def buffers(*rows):
    return [Buffer(str(index), *row) for index, row in enumerate(rows)]


def outcome(trace, settings=CachingSettings()):
    found = simulate(trace, settings)
    return found.reserved_bytes / MIB, found.device_requests


def test_small_requests_share_segments_of_two_mebibytes():
    assert outcome(buffers((0, 9, MIB), (1, 9, MIB))) == (2, 1)
    assert outcome(buffers((0, 9, MIB), (1, 9, MIB), (2, 9, 1))) == (4, 2)


def test_middle_requests_share_segments_of_twenty_and_large_ones_have_their_own():
    assert outcome(buffers((0, 9, 9 * MIB), (1, 9, 9 * MIB))) == (20, 1)
    assert outcome(buffers((0, 9, 11 * MIB), (1, 9, 15 * MIB))) == (12 + 16, 2)


def test_sizes_are_rounded_to_512_bytes():
    assert simulate(buffers((0, 9, 1), (1, 9, 513))).allocated_bytes == 512 + 1024


def test_a_freed_block_is_used_again_and_freed_neighbours_merge():
    # Two halves of a freed 40 MiB block are one block again when both are free.
    trace = buffers((0, 1, 40 * MIB), (1, 4, 20 * MIB), (2, 3, 20 * MIB), (4, 6, 40 * MIB))
    assert outcome(trace) == (40, 1)


def test_a_block_that_is_too_large_by_at_most_one_mebibyte_is_handed_out_whole():
    found = simulate(buffers((0, 1, 41 * MIB), (1, 2, 41 * MIB - 512)))
    # 41 MiB is in a segment of 42, whose last mebibyte is not worth splitting off.
    assert (found.reserved_bytes, found.allocated_bytes) == (42 * MIB, 42 * MIB)


def test_growing_requests_fragment_segments_and_not_expandable_ones():
    trace = buffers(*[(n, n + 1, (20 + 10 * n) * MIB) for n in range(6)])
    assert outcome(trace) == (20 + 30 + 40 + 50 + 60 + 70, 6)
    assert outcome(trace, EXPANDABLE) == (80, 4)


def test_max_split_size_keeps_large_blocks_whole():
    trace = buffers((0, 1, 600 * MIB), (1, 9, 100 * MIB), (2, 9, 590 * MIB))
    assert outcome(trace) == (600 + 590, 2)
    assert outcome(trace, CachingSettings(max_split_bytes=512 * MIB)) == (600 + 100, 2)


@pytest.mark.parametrize("settings", [CachingSettings(), EXPANDABLE, CachingSettings(max_split_bytes=32 * MIB)])
@pytest.mark.parametrize("seed", range(10))
def test_reserved_is_never_below_allocated_nor_allocated_below_the_live_load(seed, settings):
    draw = random.Random(seed)
    trace = []
    for index in range(300):
        lower = draw.randrange(400)
        trace.append(Buffer(str(index), lower, lower + draw.randint(1, 60), int(2 ** draw.uniform(0, 27))))
    found = simulate(trace, settings)
    live = max(sum(b.size_bytes for b in trace if b.lower <= instant < b.upper) for instant in range(460))
    assert live <= found.allocated_bytes <= found.reserved_bytes
    assert simulate(trace, settings) == found
