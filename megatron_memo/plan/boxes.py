"""Buffers as arrays, their load over time, and groups that never meet: what every solver here works on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, List, Sequence

import numpy as np

from .records import Buffer


class Deadline:
    """A moment of the wall clock, and a share of the work that is not measured by it.

    Attributes:
        seconds: the time as it was given. Unlike what is left, it is the same in every run: limits on effort go by it.
        cut_short: some search ended because of the clock, so another run may end elsewhere.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.cut_short = False
        self._clock = clock
        self._end = clock() + seconds

    def part(self, fraction: float) -> "Deadline":
        """A deadline for a fraction of the time as it was given, from now on, and not after this one. Tell this one with :meth:`join`."""
        part = Deadline(self.seconds * fraction, self._clock)
        part._end = min(part._end, self._end)
        return part

    def join(self, part: "Deadline") -> None:
        """Takes over whether ``part`` was cut short."""
        self.cut_short = self.cut_short or part.cut_short

    def left_s(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(0.0, self._end - self._clock())

    def over(self) -> bool:
        """Whether it has passed. Ask only where the answer decides whether work goes on."""
        if self._clock() < self._end:
            return False
        self.cut_short = True
        return True


@dataclass(frozen=True, eq=False)
class Boxes:
    """What has to be placed: box i takes ``size[i]`` bytes during [lower[i], upper[i]). Three int64 arrays of one length."""

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.size)

    def take(self, indices: np.ndarray) -> "Boxes":
        return Boxes(self.lower[indices], self.upper[indices], self.size[indices])


def boxes_of(buffers: Sequence[Buffer], alignment_bytes: int) -> Boxes:
    """Sizes rounded up to the alignment; instants renumbered 0, 1, 2, ... which keeps every overlap as it is."""
    size = np.array([buffer.size_bytes for buffer in buffers], np.int64)
    lower = np.array([buffer.lower for buffer in buffers], np.int64)
    upper = np.array([buffer.upper for buffer in buffers], np.int64)
    return compressed(Boxes(lower, upper, -(-size // alignment_bytes) * alignment_bytes))


def compressed(boxes: Boxes) -> Boxes:
    """The same boxes with their instants renumbered by rank. Lifetimes overlap exactly where they did."""
    instants = np.unique(np.concatenate((boxes.lower, boxes.upper)))
    return Boxes(np.searchsorted(instants, boxes.lower), np.searchsorted(instants, boxes.upper), boxes.size)


def load(boxes: Boxes) -> np.ndarray:
    """Live bytes at each instant of compressed boxes, [instants] int64."""
    change = np.zeros(int(boxes.upper.max()) + 1, np.int64)
    np.add.at(change, boxes.lower, boxes.size)
    np.subtract.at(change, boxes.upper, boxes.size)
    return np.cumsum(change)


def bound(boxes: Boxes) -> int:
    """The largest load in bytes: no plan can have a smaller peak."""
    return int(load(compressed(boxes)).max())


def separate(boxes: Boxes) -> List[np.ndarray]:
    """Indices of groups of boxes such that no box of one is ever alive with one of another, in order of time."""
    order = np.argsort(boxes.lower, kind="stable")
    latest = np.maximum.accumulate(boxes.upper[order])
    cuts = np.nonzero(boxes.lower[order][1:] >= latest[:-1])[0] + 1
    return np.split(order, cuts)


def peak(boxes: Boxes, offsets: np.ndarray) -> int:
    """Bytes that boxes at ``offsets`` reach up to."""
    return int((offsets + boxes.size).max())
