"""Large boxes and crumbs apart: crumbs that are alive among large boxes of a few sizes spoil their fit, and cost more than they weigh.

Boxes so small that all of them together hardly count get a range of their own above the others. The others often have few
sizes with a large common divisor and then meet their bound exactly.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from .boxes import Boxes, Deadline, bound, compressed
from .greedy import by_time
from .one_level import Solution, solve
from .records import Settings

# What the crumbs' own range may cost, as a fraction of the load bound.
MOST_OF_BOUND = 0.0005


def crumbs(boxes: Boxes) -> np.ndarray:
    """Which boxes are crumbs, [boxes] bool: the smallest ones, as many as their largest load is within MOST_OF_BOUND of everything's."""
    most = int(MOST_OF_BOUND * bound(boxes))
    found = np.zeros(len(boxes), bool)
    low, high = 0, len(sizes := np.unique(boxes.size))
    while low < high:  # how many of the sizes, from the smallest, are crumbs: the load grows with it
        middle = (low + high + 1) // 2
        tried = boxes.size <= sizes[middle - 1]
        if by_time(compressed(boxes.take(np.nonzero(tried)[0]))).peak_bytes <= most:
            low, found = middle, tried
        else:
            high = middle - 1
    return found


def solve_apart(boxes: Boxes, target_bytes: int, deadline: Deadline, settings: Settings, exact: bool) -> Optional[Solution]:
    """The large boxes as :func:`one_level.solve` places them, the crumbs above; None when there are no crumbs. Proves no more than the load bound."""
    small = crumbs(boxes)
    if not small.any() or small.all():
        return None
    large = np.nonzero(~small)[0]
    above = by_time(compressed(boxes.take(np.nonzero(small)[0])))
    below = solve(compressed(boxes.take(large)), target_bytes - above.peak_bytes, deadline, settings, exact)
    offsets = np.empty(len(boxes), np.int64)
    offsets[large] = below.offsets
    offsets[small] = below.peak_bytes + above.offsets
    return Solution(offsets, below.peak_bytes + above.peak_bytes, bound(boxes), tuple(f"{way}, crumbs above" for way in below.how))
