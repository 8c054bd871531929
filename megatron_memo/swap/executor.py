"""Sends groups of tensors to the host and brings them back, in a fixed order that never depends on when a copy is done.

A layer pass (one layer, one micro-batch) owns a :class:`PassStore`; what one tile saves is a :class:`Group` of it. A group's life:

    HELD      its storages are on the device, by reference
    LEAVING   copies out are queued; the device storages are kept until :meth:`Executor.settle`
    HOST      only the host slab has the bytes
    COMING    copies in are queued into fresh device memory
    HERE      compute may use them (again)

Nothing polls, so the sequence of allocations is the same at every step.
"""

from __future__ import annotations

import weakref
from collections import deque
from enum import Enum
from typing import Any, Deque, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .slab import Block, HostSlab, aligned
from .streams import Order, Stream, Streams


class State(Enum):
    HELD = "held"
    LEAVING = "leaving"
    HOST = "host"
    COMING = "coming"
    HERE = "here"
    CLOSED = "closed"


class View(NamedTuple):
    """How a tensor looks at its storage: what is needed to make it again from the same bytes."""

    dtype: torch.dtype
    shape: torch.Size
    stride: Tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.shape, self.stride)


class Handle(NamedTuple):
    """Stands for a tensor of a group."""

    group: "Group"
    key: int
    view: View

    def tensor(self) -> Tensor:
        """The tensor, on the device. Only between :meth:`Executor.ready` and :meth:`Executor.close`, or while the group is held."""
        return self.view.on(self.group.storage(self.key))


def storage_key(tensor: Tensor) -> int:
    """Identifies a storage while it is alive."""
    return tensor.untyped_storage().data_ptr()


class Group:
    """Storages that travel together; two views of one storage are one copy."""

    def __init__(self) -> None:
        self.state = State.HELD
        self._device: Dict[int, Tensor] = {}
        self._host: Dict[int, Tensor] = {}
        self._event: Optional[Any] = None
        self.device: Optional[torch.device] = None
        self.size_bytes = 0

    def add(self, tensor: Tensor) -> Handle:
        """Takes part of ``tensor``'s storage's life until the group is closed."""
        key = storage_key(tensor)
        if key not in self._device:
            storage = tensor.untyped_storage()
            self.device = tensor.device
            self._device[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
            self.size_bytes += aligned(storage.nbytes())
        return Handle(self, key, View.of(tensor))

    def forget(self) -> None:
        """Drops the storages without a trace: for measuring only."""
        self._device = {}

    def storage(self, key: int) -> torch.UntypedStorage:
        if self.state not in (State.HELD, State.HERE, State.LEAVING):
            raise RuntimeError(f"a saved activation was asked for while its group is {self.state.value!r}: the backward pass did not fetch it first")
        return self._device[key].untyped_storage()


class PassStore:
    """The host bytes of one layer pass. ``sent_bytes`` counts what went there."""

    def __init__(self, block: Optional[Block]) -> None:
        self.block = block
        self.sent_bytes = 0
        self._unread = 0
        self._last_read: Optional[Any] = None
        # A graph that is dropped without a backward pass returns its bytes too.
        if block is not None:
            weakref.finalize(self, block.give_back)

    def sent(self, group: Group) -> None:
        self._unread += 1
        self.sent_bytes += group.size_bytes

    def read(self, event: Optional[Any]) -> None:
        """A group has been fetched; with the last one the block is free for whoever waits for ``event``."""
        self._unread -= 1
        self._last_read = event if event is not None else self._last_read
        if self._unread == 0 and self.block is not None:
            self.block.give_back(self._last_read)


class Executor:
    """Runs the copies of one device over one slab.

    Args:
        streams: the device's queues.
        slab: host memory for all passes; None measures only: groups sent are counted and dropped.
        leaving_limit_bytes: device bytes that may wait for their copies out before compute is made to wait; None is no limit, and what has
            been sent since the last :meth:`settle` then stays until the next one.
    """

    def __init__(self, streams: Streams, slab: Optional[HostSlab], leaving_limit_bytes: Optional[int] = None) -> None:
        self._streams, self._slab, self._limit = streams, slab, leaving_limit_bytes
        self._recent = 0
        self._leaving: Deque[Group] = deque()
        self._coming: Dict[int, Tuple[Group, "weakref.ref[PassStore]"]] = {}

    @property
    def measuring(self) -> bool:
        return self._slab is None

    def open(self, size_bytes: int) -> PassStore:
        """The store of a new pass that will send ``size_bytes`` (as measured)."""
        return PassStore(self._slab.take(size_bytes) if self._slab is not None and size_bytes else None)

    def send(self, group: Group, store: PassStore) -> None:
        """Queues the copies of all storages of ``group`` into ``store``'s block."""
        if not group._device:
            return
        store.sent(group)
        if self._slab is None:
            group._device, group.state = {}, State.HOST
            return
        streams, block = self._streams, store.block
        if block is None:
            raise RuntimeError(f"a pass that was measured to send nothing sends {group.size_bytes} bytes")
        streams.wait(Stream.OUT, streams.record(Stream.COMPUTE), Order.PRODUCED)
        if block.read_by is not None:
            streams.wait(Stream.OUT, block.read_by, Order.SLOT_READ)
        for key, source in group._device.items():
            group._host[key] = slot = block.place(source.numel())
            streams.copy(Stream.OUT, slot, source)
        group._event, group.state = streams.record(Stream.OUT), State.LEAVING
        self._leaving.append(group)
        self._recent += 1
        if self._limit is not None:
            while len(self._leaving) > 1 and sum(g.size_bytes for g in self._leaving) > self._limit:
                self._retire()

    def settle(self) -> None:
        """Frees the device storages of groups sent so far (without a limit: before the last call): compute waits for their copies.

        Call it where compute has long work queued since they were sent, such as after attention.
        """
        stay = 0 if self._limit is not None else self._recent
        while len(self._leaving) > stay:
            self._retire()
        self._recent = 0
        # Fetched for a backward pass that never came (its graph was dropped): the memory is freed only when the copies in are over.
        for number in [number for number, (_, store) in self._coming.items() if store() is None]:
            self.close(self._coming.pop(number)[0])

    def _retire(self) -> None:
        group = self._leaving.popleft()
        if group.state is not State.LEAVING:
            return  # fetched again before it had left: it is released at close()
        self._streams.wait(Stream.COMPUTE, group._event, Order.LEFT)
        for source in group._device.values():
            self._streams.release(source)
        group._device, group._event, group.state = {}, None, State.HOST

    def fetch(self, group: Group, store: PassStore) -> None:
        """Queues the copies in. A group that has not left yet simply stays. Does nothing when it has been called before."""
        if group.state is State.LEAVING:
            group.state = State.HERE  # its event stays: the copy out still reads the storages
            store.read(None)
        elif group.state is State.HOST:
            for key, slot in group._host.items():
                group._device[key] = self._streams.landing(slot.numel(), group.device)
            self._streams.wait(Stream.IN, self._streams.record(Stream.COMPUTE), Order.LANDING_FREE)
            for key, slot in group._host.items():
                self._streams.copy(Stream.IN, group._device[key], slot)
            group._event, group.state = self._streams.record(Stream.IN), State.COMING
            store.read(group._event)
            self._coming[id(group)] = (group, weakref.ref(store))

    def ready(self, group: Group, store: PassStore) -> None:
        """Makes compute wait until ``group`` is there, fetching it first where that has not been done."""
        self.fetch(group, store)
        if group.state is State.COMING:
            del self._coming[id(group)]
            self._arrive(group)

    def close(self, group: Group) -> None:
        """Lets go of the storages of ``group``: nobody asks for them again."""
        if group.state is State.COMING:
            self._arrive(group)
        if group._event is not None:
            self._streams.wait(Stream.COMPUTE, group._event, Order.LEFT)
        for storage in group._device.values():
            self._streams.release(storage)
        group._device, group._host, group._event, group.state = {}, {}, None, State.CLOSED

    def _arrive(self, group: Group) -> None:
        self._streams.wait(Stream.COMPUTE, group._event, Order.ARRIVED)
        group._event, group.state = None, State.HERE

    def stall_ms(self) -> float:
        """Time that compute has waited for copies so far, in ms."""
        return self._streams.stall_ms()
