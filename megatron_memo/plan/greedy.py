"""Fast placements: one box after the other, never moved again.

Three kinds. Lowest first: the arena is filled from the bottom; of all boxes the one that can lie lowest comes next, an order decides between equals. On transformer
steps this meets the bound almost always. By order: boxes sorted by some key, each put into the lowest (first fit) or the tightest (best fit)
gap that is free during its whole life; the usual heuristic of offline allocation (Pisarchyk and Lee, arXiv 2001.03288). By time: what an allocator does that knows
the present only; worse, but n log n, so that there always is a plan however short the deadline.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum
from functools import partial
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from .boxes import Boxes, Deadline, load, peak

_INFINITE = np.iinfo(np.int64).max
_BETWEEN_LOOKS_AT_THE_CLOCK = 64


class Fit(Enum):
    """Which of the gaps that are large enough."""

    FIRST = "first fit"
    BEST = "best fit"


class Placed(NamedTuple):
    """Offsets in bytes (int64, one a box), how far they reach, and how they were found."""

    offsets: np.ndarray
    peak_bytes: int
    how: str


def lowest_first(boxes: Boxes, order: np.ndarray, below_bytes: int, deadline: Deadline) -> Optional[np.ndarray]:
    """Offsets for ``boxes`` when always the one that can lie lowest comes next; None as in :func:`place`. Nothing is put below what lies there already."""
    # Sorted by order, so that the first of the lowest is the one that the order prefers.
    lower, upper, size = boxes.lower[order], boxes.upper[order], boxes.size[order]
    lowest = np.zeros(len(boxes), np.int64)  # where a box can lie; infinite once it does
    placed = np.empty(len(boxes), np.int64)
    for count in range(len(boxes)):
        if count % _BETWEEN_LOOKS_AT_THE_CLOCK == 0 and deadline.over():
            return None
        box = int(np.argmin(lowest))
        placed[box] = lowest[box]
        end = placed[box] + size[box]
        if end >= below_bytes:
            return None
        lowest[(lower < upper[box]) & (upper > lower[box]) & (lowest < end)] = end
        lowest[box] = _INFINITE
    offsets = np.empty(len(boxes), np.int64)
    offsets[order] = placed
    return offsets


def place(boxes: Boxes, order: np.ndarray, fit: Fit, below_bytes: int, deadline: Deadline) -> Optional[np.ndarray]:
    """Offsets for ``boxes`` taken in ``order``; None as soon as the peak cannot stay below ``below_bytes``, or the deadline passes."""
    # Rows: lower, upper, offset, end of the boxes placed so far, sorted by offset.
    table = np.empty((4, len(boxes)), np.int64)
    offsets = np.empty(len(boxes), np.int64)
    for count, box in enumerate(order):
        if count % _BETWEEN_LOOKS_AT_THE_CLOCK == 0 and deadline.over():
            return None
        lower, upper, size = boxes.lower[box], boxes.upper[box], boxes.size[box]
        meets = np.nonzero((table[0, :count] < upper) & (table[1, :count] > lower))[0]
        offset = _gap(table[2, meets], table[3, meets], size, fit)
        if offset + size >= below_bytes:
            return None
        offsets[box] = offset
        at = int(np.searchsorted(table[2, :count], offset))
        table[:, at + 1 : count + 1] = table[:, at:count].copy()
        table[:, at] = lower, upper, offset, offset + size
    return offsets


def _gap(starts: np.ndarray, ends: np.ndarray, size: int, fit: Fit) -> int:
    """Offset of a gap of at least ``size`` bytes between occupied ranges, which are sorted by start and may overlap."""
    if not len(starts):
        return 0
    floors = np.concatenate(([0], np.maximum.accumulate(ends)))
    room = np.append(starts, _INFINITE) - floors
    if fit is Fit.BEST:
        inside = room[:-1]
        fits = inside >= size
        if fits.any():
            return int(floors[int(np.argmin(np.where(fits, inside, _INFINITE)))])
        return int(floors[-1])
    return int(floors[int(np.argmax(room >= size))])


def orders(boxes: Boxes) -> Dict[str, np.ndarray]:
    """Orders worth trying, the generally best ones first. ``boxes`` are compressed. Ties end in the index, so that each order is unique."""
    size, life = boxes.size, boxes.upper - boxes.lower
    pressure = _largest_within(load(boxes), boxes.lower, boxes.upper)
    # np.lexsort sorts by its last key first; negated for "largest first".
    keys = {
        "size": (boxes.lower, -life, -size),
        "pressure, life": (boxes.lower, -size, -life, -pressure),
        "area": (boxes.lower, -size, -size.astype(float) * life),
        "life": (boxes.lower, -size, -life),
        "pressure, size": (boxes.lower, -life, -size, -pressure),
        "pressure, area": (boxes.lower, -size.astype(float) * life, -pressure),
        "start": (-size, -life, boxes.lower),
        "end": (-size, -life, -boxes.upper),
    }
    return {name: np.lexsort(columns) for name, columns in keys.items()}


def long_first(boxes: Boxes, quantile: float) -> np.ndarray:
    """The boxes whose life is above this quantile in order of time, then the others by size.

    Pipeline schedules need it: activations that wait for their backward pass then follow one another into the same places, as in a queue.
    """
    life = boxes.upper - boxes.lower
    long = life > np.quantile(life, quantile)
    return np.lexsort((-boxes.size, np.where(long, boxes.lower, 0), ~long))


def _largest_within(values: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """max(values[start[i]:stop[i]]) for each i, from maxima over powers of two."""
    levels = [values]
    while 2 * (1 << (len(levels) - 1)) <= len(values):
        half = 1 << (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    level = np.frompyfunc(lambda length: int(length).bit_length() - 1, 1, 1)(stop - start).astype(np.int64)
    found = np.empty(len(start), np.int64)
    for k in np.unique(level):
        rows = np.nonzero(level == k)[0]
        found[rows] = np.maximum(levels[k][start[rows]], levels[k][stop[rows] - (1 << int(k))])
    return found


def by_time(boxes: Boxes) -> Placed:
    """Boxes in order of their lower, each in the tightest free range of that instant. Needs no deadline: n log n."""
    events = sorted([(int(t), 1, i) for i, t in enumerate(boxes.lower)] + [(int(t), 0, i) for i, t in enumerate(boxes.upper)])
    sizes = boxes.size.tolist()
    free = _FreeRanges()
    offsets: List[int] = [0] * len(boxes)
    for _, begins, box in events:
        if begins:
            offsets[box] = free.take(sizes[box])
        else:
            free.give(offsets[box], sizes[box])
    result = np.array(offsets, np.int64)
    return Placed(result, peak(boxes, result), "best fit in order of time")


class _FreeRanges:
    """The free ranges below the top of an arena, neighbours merged. There is no end: what fits nowhere goes on top."""

    def __init__(self) -> None:
        self._top = 0
        self._by_size: List[Tuple[int, int]] = []  # (size, start), sorted
        self._stop_of: Dict[int, int] = {}
        self._start_of: Dict[int, int] = {}

    def take(self, size: int) -> int:
        place_ = bisect_left(self._by_size, (size, -1))
        if place_ < len(self._by_size):
            _, start = self._by_size[place_]
            stop = self._stop_of[start]
            self._remove(start, stop)
            if start + size < stop:
                self._add(start + size, stop)
            return start
        # The topmost range, if it touches the top, is where the arena grows from.
        start = self._start_of.get(self._top, self._top)
        if start < self._top:
            self._remove(start, self._top)
        self._top = start + size
        return start

    def give(self, start: int, size: int) -> None:
        stop = start + size
        if stop in self._stop_of:
            after = self._stop_of[stop]
            self._remove(stop, after)
            stop = after
        if start in self._start_of:
            before = self._start_of[start]
            self._remove(before, start)
            start = before
        self._add(start, stop)

    def _add(self, start: int, stop: int) -> None:
        insort(self._by_size, (stop - start, start))
        self._stop_of[start] = stop
        self._start_of[stop] = start

    def _remove(self, start: int, stop: int) -> None:
        self._by_size.pop(bisect_left(self._by_size, (stop - start, start)))
        del self._stop_of[start], self._start_of[stop]


def best_of_orders(boxes: Boxes, target_bytes: int, deadline: Deadline) -> Placed:
    """The best placement of all kinds and orders; stops at the first whose peak is at most ``target_bytes``."""
    best = by_time(boxes)
    for how, solver in _solvers(boxes):
        if best.peak_bytes <= target_bytes or deadline.over():
            break
        offsets = solver(best.peak_bytes, deadline)
        if offsets is not None:
            best = Placed(offsets, peak(boxes, offsets), how)
    return best


_Solver = Callable[[int, Deadline], Optional[np.ndarray]]


def _solvers(boxes: Boxes) -> Iterator[Tuple[str, _Solver]]:
    """All ways worth trying, the generally best ones first; each asks for a peak below so many bytes."""
    by_key = orders(boxes)
    for key in ("life", "area", "pressure, life", "end", "size"):
        yield f"lowest first by {key}", partial(lowest_first, boxes, by_key[key])
    by_key = {**{f"long first ({quantile})": long_first(boxes, quantile) for quantile in (0.7, 0.8, 0.9, 0.5)}, **by_key}
    for key, order in by_key.items():
        for fit in Fit:
            yield f"{fit.value} by {key}", partial(place, boxes, order, fit)
