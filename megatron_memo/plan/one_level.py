"""All boxes in one problem: greedy placements, and the exact solver for groups of boxes where those miss the bound."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import numpy as np

from .boxes import Boxes, Deadline, compressed, load, peak, separate
from .exact import Answer, pairs_alive, within
from .greedy import Placed, best_of_orders
from .records import Settings

# Above this many pairs of boxes that are alive together, building the exact model alone takes longer than a start of training should.
MOST_PAIRS = 300_000


class Solution(NamedTuple):
    """Offsets in bytes (int64, one a box), their peak, a peak that no placement can go below, and how it was found, one entry a way."""

    offsets: np.ndarray
    peak_bytes: int
    proven_bytes: int
    how: Tuple[str, ...]


class _Group(NamedTuple):
    """Boxes (by index) that share no instant with any others, their best placement so far, and what no placement can go below."""

    indices: np.ndarray
    boxes: Boxes
    best: Placed
    proven_bytes: int


def solve(boxes: Boxes, target_bytes: int, deadline: Deadline, settings: Settings, exact: bool, start: Optional[Solution] = None) -> Solution:
    """The smallest peak that is found in time. No work is done to go below ``target_bytes`` or the bound, whichever is larger.

    ``exact``: not by greedy placements alone. ``start``: what these have found already, which saves finding it again.
    """
    groups: List[_Group] = []
    for indices in separate(boxes):
        part = compressed(boxes.take(indices))
        lowest = int(load(part).max())
        if start is None:
            best = best_of_orders(part, max(target_bytes, lowest), deadline)
        else:
            best = Placed(start.offsets[indices], peak(part, start.offsets[indices]), start.how[0])
        groups.append(_Group(indices, part, best, lowest))
    # One group's peak is what the others may reach too.
    floor = max(target_bytes, max(group.proven_bytes for group in groups))
    hard = [at for at, group in enumerate(groups) if exact and group.best.peak_bytes > floor]
    for count, at in enumerate(hard):
        part_deadline = deadline.part(1 / (len(hard) - count))
        groups[at] = _improve(groups[at], floor, part_deadline, settings)
        deadline.join(part_deadline)
        floor = max(floor, groups[at].proven_bytes)
    offsets = np.empty(len(boxes), np.int64)
    for group in groups:
        offsets[group.indices] = group.best.offsets
    highest = max(group.best.peak_bytes for group in groups)
    how = dict.fromkeys(group.best.how for group in groups if group.best.peak_bytes == highest)
    return Solution(offsets, highest, max(group.proven_bytes for group in groups), tuple(how))


def _improve(group: _Group, floor_bytes: int, deadline: Deadline, settings: Settings) -> _Group:
    """Asks the exact solver for a placement within the least capacity worth having; failing that, halves the distance to what is known to be possible."""
    if pairs_alive(group.boxes) > MOST_PAIRS:
        return group
    unit = int(np.gcd.reduce(group.boxes.size))  # peaks are multiples of it
    best, proven = group.best, group.proven_bytes
    # Half for the first question, a quarter for the next, ...; with a capacity the first one is what matters.
    share = 0.5 if settings.capacity_bytes is None else 0.9
    asked = lowest = max(floor_bytes, proven)  # up to `lowest` nothing need be asked for (again)
    while asked < best.peak_bytes and deadline.left_s() > 0:
        part = deadline.part(share)
        found = within(group.boxes, asked, part, settings.workers, settings.seed)
        deadline.join(part)
        if found.answer is Answer.FOUND:
            best = Placed(found.offsets, peak(group.boxes, found.offsets), "CP-SAT")
        else:
            lowest = asked
            if found.answer is Answer.NONE:
                proven = max(proven, found.bound_bytes)
        asked = lowest + max(unit, (best.peak_bytes - lowest) // 2 // unit * unit)
        share = min(share, 1 - share) if share > 0.5 else share / 2
    return group._replace(best=best, proven_bytes=min(proven, best.peak_bytes))
