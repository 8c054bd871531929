"""The passes of a pipeline stage, against Megatron's own schedule where it is installed, and the host memory that they hold."""

import itertools

import pytest

from megatron_memo.swap.schedule import Pass, Schedule, host_bytes
from megatron_memo.swap.slab import ALIGNMENT_BYTES

PLAIN = [Schedule(stages, stage, 1, micro_batches) for stages in (1, 2, 4) for stage in range(stages) for micro_batches in (1, 2, 3, 8)]
INTERLEAVED = [
    Schedule(stages, stage, chunks, micro_batches, group)
    for stages in (2, 4)
    for stage in range(stages)
    for chunks in (2, 3)
    for micro_batches in (stages, 2 * stages, 5 * stages)
    for group in (0, stages)
]


@pytest.mark.parametrize("schedule", PLAIN + INTERLEAVED, ids=str)
def test_every_chunk_runs_every_micro_batch_forward_and_then_backward(schedule):
    passes = list(schedule.passes())
    assert len(passes) == 2 * schedule.chunks * schedule.micro_batches
    for chunk in range(schedule.chunks):
        mine = [one.forward for one in passes if one.chunk == chunk]
        waiting = list(itertools.accumulate(1 if forward else -1 for forward in mine))
        assert mine.count(True) == schedule.micro_batches and min(waiting) >= 0 and waiting[-1] == 0


@pytest.mark.parametrize("stage, in_flight", [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_a_stage_of_1f1b_has_as_many_passes_in_flight_as_stages_from_it_to_the_end(stage, in_flight):
    assert Schedule(4, stage, 1, 16).in_flight() == in_flight
    assert Schedule(4, stage, 1, 2).in_flight() == min(in_flight, 2)


@pytest.mark.parametrize("schedule", INTERLEAVED, ids=str)
def test_interleaved_chunks_take_turns_as_megatrons_table_says(schedule):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", reason="megatron-core is not installed", exc_type=ImportError)
    table = schedules.get_schedule_table(schedule.micro_batches, schedule.chunks, schedule.group or schedule.stages)
    passes = list(schedule.passes())
    assert [one.chunk for one in passes if one.forward] == [chunk for _, chunk in table]
    assert [one.chunk for one in passes if not one.forward] == [schedule.chunks - 1 - chunk for _, chunk in table]


def test_two_interleaved_chunks_on_the_last_of_two_stages():
    F, B = True, False
    expected = [(0, F), (0, F), (1, F), (1, B), (1, F), (1, B), (0, F), (0, B), (0, F), (0, B), (1, F), (1, B), (1, F), (1, B), (0, B), (0, B)]
    assert list(Schedule(2, 1, 2, 4).passes()) == [Pass(*one) for one in expected]


@pytest.mark.parametrize("schedule", PLAIN + INTERLEAVED, ids=str)
def test_equal_blocks_need_no_more_than_what_is_in_flight(schedule):
    size = 3 * ALIGNMENT_BYTES
    assert host_bytes(schedule, [[size, size]] * schedule.chunks) == schedule.in_flight() * 2 * size


def test_blocks_are_sized_by_their_own_chunk_and_rounded_up():
    small, large = ALIGNMENT_BYTES - 1, 5 * ALIGNMENT_BYTES
    last = Schedule(2, 1, 2, 2)  # forward 0, 0, 1, backward 1, forward 1, backward 1, 0, 0
    assert host_bytes(last, [[small], [large, 0]]) == 7 * ALIGNMENT_BYTES
    assert host_bytes(last, [[0], []]) == 0
