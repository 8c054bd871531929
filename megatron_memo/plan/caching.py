"""What PyTorch's native caching allocator would reserve for a trace: simulated on addresses alone, one stream, constants of torch 2.11.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes; requests up to 1 MiB and larger ones have a pool each; the smallest
free block that is large enough is taken and split; where there is none, a segment is asked for from the device. Freed neighbours inside a
segment merge, segments stay. With expandable segments a pool is one range that grows by pages. Not in it: several streams, garbage collection
thresholds, roundup_power2_divisions, and what the simulated device has besides this trace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from .records import Buffer

MIB = 2**20
_ROUND = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_LEAST_LARGE = 10 * MIB


@dataclass(frozen=True)
class CachingSettings:
    """PYTORCH_CUDA_ALLOC_CONF, as far as it is simulated.

    Attributes:
        expandable: expandable_segments:True.
        max_split_bytes: max_split_size_mb in bytes; None: any block may be split.
    """

    expandable: bool = False
    max_split_bytes: Optional[int] = None

    @property
    def name(self) -> str:
        if self.expandable:
            return "expandable segments"
        return "caching allocator" if self.max_split_bytes is None else f"max_split_size_mb:{self.max_split_bytes // MIB}"


@dataclass(frozen=True)
class CachingResult:
    """Largest bytes reserved from the device, largest bytes handed out (rounded), and how many times the device was asked."""

    reserved_bytes: int
    allocated_bytes: int
    device_requests: int


@dataclass(eq=False)
class _Block:
    """A piece of a segment; ``before`` and ``after`` are its neighbours in address."""

    segment: int
    start: int
    size: int
    used: bool = False
    before: Optional["_Block"] = None
    after: Optional["_Block"] = None

    @property
    def key(self) -> Tuple[int, int, int]:
        return self.size, self.segment, self.start


class _Pool:
    """One of the two pools. ``reserved_bytes`` only grows: nothing is given back as long as the device has room."""

    def __init__(self, small: bool, settings: CachingSettings) -> None:
        self.reserved_bytes = 0
        self.device_requests = 0
        self._small = small
        self._settings = settings
        self._free: List[Tuple[int, int, int]] = []  # keys, sorted
        self._block_of: Dict[Tuple[int, int, int], _Block] = {}
        self._last: Optional[_Block] = None  # of the one segment, when that is expandable

    def take(self, size: int) -> _Block:
        block = self._found(size) or self._grown(size)
        self._split(block, size)
        block.used = True
        return block

    def give(self, block: _Block) -> None:
        block.used = False
        for neighbour in (block.after, block.before):
            if neighbour is not None and not neighbour.used:
                self._out(neighbour)
                self._merge(block, neighbour)
        self._in(block)

    def _found(self, size: int) -> Optional[_Block]:
        place = bisect_left(self._free, (size, -1, -1))
        if place == len(self._free):
            return None
        block = self._block_of[self._free[place]]
        limit = self._settings.max_split_bytes
        if limit is not None and not self._small and not self._settings.expandable:
            # Oversize blocks serve oversize requests only, and only those that leave less than a large segment unused.
            if size < limit <= block.size or size >= limit and block.size >= size + _LARGE_SEGMENT:
                return None
        self._out(block)
        return block

    def _grown(self, size: int) -> _Block:
        if self._settings.expandable:
            page = _SMALL_SEGMENT if self._small else _LARGE_SEGMENT
            last = self._last
            tail = last if last is not None and not last.used else None
            missing = -(-(size - (tail.size if tail else 0)) // page) * page
            self._reserve(missing)
            if tail is not None:
                self._out(tail)
                tail.size += missing
                return tail
            block = _Block(0, last.start + last.size if last else 0, missing, before=last)
            if last is not None:
                last.after = block
            self._last = block
            return block
        if self._small:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _LEAST_LARGE else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self._reserve(segment)
        return _Block(self.device_requests, 0, segment)

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        limit = self._settings.max_split_bytes
        if self._small or self._settings.expandable:
            splits = rest >= _ROUND
        else:
            splits = rest > _SMALL and (limit is None or size < limit)
        if not splits:
            return
        other = _Block(block.segment, block.start + size, rest, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        if self._last is block:
            self._last = other
        block.after = other
        block.size = size
        self._in(other)

    def _merge(self, block: _Block, neighbour: _Block) -> None:
        """``block`` takes the room of a free neighbour."""
        if neighbour is block.after:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        else:
            block.start = neighbour.start
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        block.size += neighbour.size
        if self._last is neighbour:
            self._last = block

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.device_requests += 1

    def _in(self, block: _Block) -> None:
        insort(self._free, block.key)
        self._block_of[block.key] = block

    def _out(self, block: _Block) -> None:
        self._free.pop(bisect_left(self._free, block.key))
        del self._block_of[block.key]


def simulate(buffers: Sequence[Buffer], settings: CachingSettings = CachingSettings()) -> CachingResult:
    """Serves the requests in order of time, frees of an instant before its allocations, from an empty cache and a device without end."""
    small, large = _Pool(True, settings), _Pool(False, settings)
    events = sorted([(b.lower, 1, i) for i, b in enumerate(buffers)] + [(b.upper, 0, i) for i, b in enumerate(buffers)])
    held: Dict[int, Tuple[_Pool, _Block]] = {}
    allocated = highest = 0
    for _, begins, index in events:
        if begins:
            size = -(-buffers[index].size_bytes // _ROUND) * _ROUND
            pool = small if size <= _SMALL else large
            block = pool.take(size)
            held[index] = pool, block
            allocated += block.size
            highest = max(highest, allocated)
        else:
            pool, block = held.pop(index)
            allocated -= block.size
            pool.give(block)
    return CachingResult(small.reserved_bytes + large.reserved_bytes, highest, small.device_requests + large.device_requests)
