"""Copies that run as late as their events allow, on a CPU: a missed ordering shows as poison in the data.

Compute runs at once, as it does on a CPU. Copies are queued; one runs only when compute (or a copy that compute waits for) has to wait
for it. Every queue carries a vector clock. A copy that is not ordered after what it depends on could, on a real device, run before it or
after its memory has been used for something else; here such a copy always delivers poison (all bits set: NaN in every float type).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

from .streams import Order, Stream

_POISON = 0xFF
Clock = Dict[Stream, int]


@dataclass(frozen=True)
class SimulatedEvent:
    """A point in one queue's order, and all that is known to be over by then."""

    stream: Stream
    time: int
    clock: Tuple[Tuple[Stream, int], ...]


@dataclass
class _Copy:
    destination: Tensor
    source: Tensor
    time: int
    written: Range
    read: Range
    torn: bool = False


@dataclass
class _Queue:
    time: int = 0
    clock: Clock = field(default_factory=lambda: {stream: 0 for stream in Stream})
    items: Deque[Tuple[int, Union[_Copy, SimulatedEvent]]] = field(default_factory=deque)


Range = Tuple[int, int]


def _range(tensor: Tensor) -> Range:
    """Addresses [begin, end) of a flat byte tensor."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel()


def _overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class SimulatedStreams:
    """The :class:`~megatron_memo.swap.streams.Streams` interface on a CPU."""

    def __init__(self) -> None:
        self._queues = {stream: _Queue() for stream in Stream}
        self._landings: Dict[int, int] = {}
        self._written: List[Tuple[Range, int]] = []
        self.torn_copies = 0

    def record(self, stream: Stream) -> SimulatedEvent:
        queue = self._queues[stream]
        queue.time += 1
        queue.clock[stream] = queue.time
        return SimulatedEvent(stream, queue.time, tuple(queue.clock.items()))

    def wait(self, stream: Stream, event: SimulatedEvent, order: Order) -> None:
        queue = self._queues[stream]
        for other, time in event.clock:
            queue.clock[other] = max(queue.clock[other], time)
        if stream is Stream.COMPUTE:
            self._run(event.stream, event.time)
        else:
            queue.items.append((queue.time + 1, event))  # just before the next copy

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        if destination.numel() != source.numel():
            raise ValueError(f"copy of {source.numel()} bytes into {destination.numel()} bytes")
        queue = self._queues[stream]
        queue.time += 1
        queue.clock[stream] = queue.time
        copy = _Copy(destination, source, queue.time, _range(destination), _range(source))
        if stream is Stream.OUT:
            self._check_out(copy, queue.clock)
        else:
            self._check_in(copy, queue.clock)
        queue.items.append((queue.time, copy))

    def landing(self, size_bytes: int, device: torch.device) -> Tensor:
        compute = self._queues[Stream.COMPUTE]
        compute.time += 1
        compute.clock[Stream.COMPUTE] = compute.time
        memory = torch.full((size_bytes,), _POISON, dtype=torch.uint8, device=device)
        self._landings[memory.data_ptr()] = compute.time
        return memory

    def release(self, tensor: Tensor) -> None:
        """A copy out of ``tensor`` that compute has not waited for reads whatever comes next into this memory."""
        known, released = self._queues[Stream.COMPUTE].clock[Stream.OUT], _range(tensor)
        for _, item in self._queues[Stream.OUT].items:
            if isinstance(item, _Copy) and item.time > known and _overlap(item.read, released):
                item.torn = True

    def stall_ms(self) -> float:
        return 0.0

    def finish(self) -> None:
        """Runs every queued copy."""
        for stream in (Stream.OUT, Stream.IN):
            self._run(stream, None)

    def _check_out(self, copy: _Copy, clock: Clock) -> None:
        if clock[Stream.COMPUTE] < self._queues[Stream.COMPUTE].time:
            copy.torn = True  # may run before the source has been produced
        for _, item in self._queues[Stream.IN].items:
            if isinstance(item, _Copy) and item.time > clock[Stream.IN] and _overlap(item.read, copy.written):
                item.torn = True  # may read the slot after this copy has overwritten it
        self._written = [(slot, time) for slot, time in self._written if not _overlap(slot, copy.written)]
        self._written.append((copy.written, copy.time))

    def _check_in(self, copy: _Copy, clock: Clock) -> None:
        allocated = self._landings.pop(copy.written[0], 0)
        if clock[Stream.COMPUTE] < allocated:
            copy.torn = True  # what compute still does to the memory's last owner may land on top of it
        if any(time > clock[Stream.OUT] and _overlap(slot, copy.read) for slot, time in self._written):
            copy.torn = True  # may read the slot before the copy out has filled it

    def _run(self, stream: Stream, until: Optional[int]) -> None:
        items = self._queues[stream].items
        while items and (until is None or items[0][0] <= until):
            _, item = items.popleft()
            if isinstance(item, SimulatedEvent):
                if item.stream is not Stream.COMPUTE:
                    self._run(item.stream, item.time)
            elif item.torn:
                item.destination.fill_(_POISON)
                self.torn_copies += 1
            else:
                item.destination.copy_(item.source)
