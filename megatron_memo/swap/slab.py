"""One piece of host memory, handed out in blocks: one block for all that a layer pass sends away."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

from torch import Tensor

from ..errors import HostMemoryError

# Copies start on whole cache lines and pages of the copy engine.
ALIGNMENT_BYTES = 512


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to the slab's alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Read(NamedTuple):
    """A copy in that has read a range, and its place in the order of such copies: the newest one is over last."""

    order: int
    event: Any


class Block:
    """Bytes [offset, offset + size) of a slab, filled from the front by one layer pass.

    Attributes:
        read_by: the event of the copy in that last read these bytes, or None. A copy into the block waits for it.
    """

    def __init__(self, slab: "HostSlab", offset: int, size_bytes: int, read: Optional[Read]) -> None:
        self._slab: Optional[HostSlab] = slab
        self._offset, self._size_bytes, self._used_bytes, self._read = offset, size_bytes, 0, read

    @property
    def read_by(self) -> Optional[Any]:
        return None if self._read is None else self._read.event

    def place(self, size_bytes: int) -> Tensor:
        """The next ``size_bytes`` of the block. Raises HostMemoryError when the pass sends more than was measured for it."""
        start, self._used_bytes = self._used_bytes, self._used_bytes + aligned(size_bytes)
        if self._used_bytes > self._size_bytes:
            raise HostMemoryError(
                f"a layer pass sends more to the host than was measured before training: its block has {self._size_bytes} bytes, "
                f"{self._used_bytes} are needed. Was the sequence length, the micro-batch size or the set of trained parameters changed during the run?"
            )
        begin = self._offset + start
        return self._slab.memory[begin : begin + size_bytes]

    def give_back(self, read_by: Optional[Any] = None) -> None:
        """Returns the block; calling it again does nothing. ``read_by``: the copy in that has to be over before the bytes are written again."""
        if self._slab is not None:
            slab, self._slab = self._slab, None
            slab.give(self._offset, self._size_bytes, self._read if read_by is None else slab.number(read_by))


class HostSlab:
    """First fit over one flat byte tensor. Layers of one kind ask for blocks of one size, so it does not fragment.

    Attributes:
        used_bytes, peak_bytes: what blocks hold now, and what they have held at most.
        end_bytes: where the block that reached furthest ended.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._free: List[Tuple[int, int, Optional[Read]]] = [(0, memory.numel(), None)] if memory.numel() else []
        self._reads = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self.end_bytes = 0

    def take(self, size_bytes: int) -> Block:
        """A block of ``size_bytes``. Raises HostMemoryError when no free range is long enough."""
        size_bytes = aligned(size_bytes)
        for index, (offset, free_bytes, read) in enumerate(self._free):
            if free_bytes >= size_bytes:
                self._free[index : index + 1] = [(offset + size_bytes, free_bytes - size_bytes, read)] if free_bytes > size_bytes else []
                self.used_bytes += size_bytes
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                self.end_bytes = max(self.end_bytes, offset + size_bytes)
                return Block(self, offset, size_bytes, read)
        raise HostMemoryError(
            f"the host slab is full: a layer pass needs {size_bytes} bytes, {self.used_bytes} of {self.memory.numel()} are in use and the longest "
            f"free range has {max((size for _, size, _ in self._free), default=0)}. More forward passes are waiting for their backward "
            "than were counted before training."
        )

    def number(self, event: Any) -> Read:
        """``event`` with its place in the order of reads."""
        self._reads += 1
        return Read(self._reads, event)

    def give(self, offset: int, size_bytes: int, read: Optional[Read]) -> None:
        """Takes bytes [offset, offset + size) back and joins them with free neighbours; the newest reader guards the joined range."""
        self.used_bytes -= size_bytes
        merged: List[Tuple[int, int, Optional[Read]]] = []
        for start, length, reader in sorted([*self._free, (offset, size_bytes, read)], key=lambda entry: entry[0]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                first, before, other = merged[-1]
                newest = max((r for r in (reader, other) if r is not None), key=lambda r: r.order, default=None)
                merged[-1] = (first, before + length, newest)
            else:
                merged.append((start, length, reader))
        self._free = merged
