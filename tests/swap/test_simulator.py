"""The simulator delivers what a device could deliver at worst."""

import torch

from megatron_memo.swap.simulator import SimulatedStreams
from megatron_memo.swap.streams import Order, Stream

POISON = 0xFF


def byte(value, count=4):
    return torch.full((count,), value, dtype=torch.uint8)


def copy_out(streams, slot, source):
    streams.wait(Stream.OUT, streams.record(Stream.COMPUTE), Order.PRODUCED)
    streams.copy(Stream.OUT, slot, source)
    return streams.record(Stream.OUT)


def copy_in(streams, landing, slot):
    streams.wait(Stream.IN, streams.record(Stream.COMPUTE), Order.LANDING_FREE)
    streams.copy(Stream.IN, landing, slot)
    return streams.record(Stream.IN)


def test_a_copy_runs_only_when_compute_waits_for_it():
    streams, slot = SimulatedStreams(), byte(0)
    event = copy_out(streams, slot, byte(7))
    assert slot.tolist() == [0] * 4
    streams.wait(Stream.COMPUTE, event, Order.LEFT)
    assert slot.tolist() == [7] * 4


def test_waiting_for_a_copy_does_not_run_later_ones():
    streams, slots = SimulatedStreams(), [byte(0), byte(0)]
    events = [copy_out(streams, slot, byte(7)) for slot in slots]
    streams.wait(Stream.COMPUTE, events[0], Order.LEFT)
    assert [slot.tolist() for slot in slots] == [[7] * 4, [0] * 4]


def test_a_copy_in_that_waits_for_a_copy_out_runs_it_first():
    streams, slot = SimulatedStreams(), byte(0)
    out = copy_out(streams, slot, byte(7))
    landing = streams.landing(4, torch.device("cpu"))
    streams.wait(Stream.IN, out, Order.LEFT)
    event = copy_in(streams, landing, slot)
    streams.wait(Stream.COMPUTE, event, Order.ARRIVED)
    assert landing.tolist() == [7] * 4


def test_landing_memory_is_poison_until_the_copy_has_run():
    streams = SimulatedStreams()
    assert streams.landing(4, torch.device("cpu")).tolist() == [POISON] * 4


def test_a_copy_that_did_not_wait_for_compute_delivers_poison():
    streams, slot = SimulatedStreams(), byte(0)
    streams.record(Stream.COMPUTE)
    streams.copy(Stream.OUT, slot, byte(7))
    streams.wait(Stream.COMPUTE, streams.record(Stream.OUT), Order.LEFT)
    assert slot.tolist() == [POISON] * 4
    assert streams.torn_copies == 1


def test_a_source_released_before_its_copy_is_over_delivers_poison():
    streams, slot, source = SimulatedStreams(), byte(0), byte(7)
    copy_out(streams, slot, source)
    streams.release(source)
    streams.finish()
    assert slot.tolist() == [POISON] * 4


def test_a_source_released_after_its_copy_is_over_does_not():
    streams, slot, source = SimulatedStreams(), byte(0), byte(7)
    streams.wait(Stream.COMPUTE, copy_out(streams, slot, source), Order.LEFT)
    streams.release(source)
    assert slot.tolist() == [7] * 4 and streams.torn_copies == 0


def test_a_slot_overwritten_under_its_reader_delivers_poison():
    streams, slot = SimulatedStreams(), byte(0)
    streams.wait(Stream.COMPUTE, copy_out(streams, slot, byte(7)), Order.LEFT)
    landing = streams.landing(4, torch.device("cpu"))
    event = copy_in(streams, landing, slot)
    copy_out(streams, slot, byte(9))
    streams.wait(Stream.COMPUTE, event, Order.ARRIVED)
    assert landing.tolist() == [POISON] * 4


def test_a_slot_read_before_it_is_filled_delivers_poison():
    streams, slot = SimulatedStreams(), byte(0)
    copy_out(streams, slot, byte(7))
    landing = streams.landing(4, torch.device("cpu"))
    streams.wait(Stream.COMPUTE, copy_in(streams, landing, slot), Order.ARRIVED)
    assert landing.tolist() == [POISON] * 4
