"""The three queues of work that swapping needs - compute, copies out, copies in - as a small interface, and its CUDA implementation.

Four orderings keep a swapped tensor right; each one that is missed corrupts a layer silently. They are named in :class:`Order`, so that a
test can leave out exactly one of them. The second implementation is :mod:`megatron_memo.swap.simulator`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, List, Protocol, Tuple

import torch
from torch import Tensor


class Stream(Enum):
    """A queue of work that runs in its own order."""

    COMPUTE = "compute"
    OUT = "device to host"
    IN = "host to device"


class Order(Enum):
    """Why one queue waits for another."""

    PRODUCED = "a copy out waits until compute has produced its source"
    LEFT = "compute waits for the copy out before the source's memory may be used again"
    LANDING_FREE = "a copy in waits until compute is done with what was in the landing memory"
    ARRIVED = "compute waits for the copy in before it uses the landing memory"
    SLOT_READ = "a copy out waits until the copy in that last read its host slot is done"


class Streams(Protocol):
    """What the executor needs of a device. Events are opaque; waits never block the host."""

    def record(self, stream: Stream) -> Any:
        """An event that is over when all work queued on ``stream`` so far is done."""

    def wait(self, stream: Stream, event: Any, order: Order) -> None:
        """Work queued on ``stream`` from now on starts only after ``event``."""

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Queues a copy of equally long flat byte tensors."""

    def landing(self, size_bytes: int, device: torch.device) -> Tensor:
        """Device memory for a copy in, allocated in compute's order: a flat byte tensor with undefined content."""

    def release(self, tensor: Tensor) -> None:
        """The caller lets go of ``tensor``: from here on, in compute's order, its memory may be used for something else."""


# Waits whose times are not added up yet; more than a step has. The older half is long over when it is added up early, by a loop that never asks.
_MOST_STALLS = 1 << 14


class CudaStreams:
    """CUDA: compute is the current stream; two streams copy.

    Memory is always allocated and freed in the compute stream's order, and the waits make that safe, so ``record_stream`` is never needed
    and the caching allocator sees the same sequence at every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queues = {Stream.OUT: torch.cuda.Stream(device), Stream.IN: torch.cuda.Stream(device)}
        self._stalls: List[Tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stall_ms = 0.0

    def _queue(self, stream: Stream) -> torch.cuda.Stream:
        return self._queues[stream] if stream is not Stream.COMPUTE else torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._queue(stream))
        return event

    def wait(self, stream: Stream, event: torch.cuda.Event, order: Order) -> None:
        queue = self._queue(stream)
        if stream is not Stream.COMPUTE:
            queue.wait_event(event)
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(queue)
        queue.wait_event(event)
        after.record(queue)
        self._stalls.append((before, after))
        if len(self._stalls) > _MOST_STALLS:
            self._fold(_MOST_STALLS // 2)

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._queue(stream)):
            destination.copy_(source, non_blocking=True)

    def landing(self, size_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def release(self, tensor: Tensor) -> None:
        """Nothing to do: the caching allocator hands the memory out again in the compute stream's order."""

    def stall_ms(self) -> float:
        """Time that compute has waited for copies so far, in ms. Waits for the device: call it at the end of a step."""
        self._fold(len(self._stalls))
        return self._stall_ms

    def _fold(self, count: int) -> None:
        """Adds up the first ``count`` waits."""
        for before, after in self._stalls[:count]:
            after.synchronize()
            self._stall_ms += before.elapsed_time(after)
        del self._stalls[:count]
