"""Two levels (MEMO paper, section 4.2): each kind of layer pass on its own, then the step with every pass folded into one block.

Buffers that are born and die inside one pass over a layer are placed once for each distinct pattern of lifetimes and sizes (its signature) and that solution is
shared: 64 equal layers are one problem, not 64. What outlives its pass, and the step's own buffers (embedding, loss), are placed
with the blocks in the second level.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .boxes import Boxes, Deadline, bound, compressed
from .one_level import Solution, solve
from .records import Buffer, Settings

# What the first level may take of the time; a pass is a small problem that many others wait for.
FIRST_LEVEL_SHARE = 0.4


class TwoLevels(NamedTuple):
    """How many kinds of passes the first level solved, and a solution for all boxes. Its ``proven_bytes`` is the load bound: folding proves no more."""

    layer_kinds: int
    solution: Solution


def passes(buffers: Sequence[Buffer], boxes: Boxes) -> List[np.ndarray]:
    """For each layer pass the indices of the buffers that are born and die inside it; passes with fewer than two such are left out.

    A pass lasts from its first buffer to the first one of the next pass. Wherever that boundary is put, the plan is right: a block is alive for as
    long as any buffer in it.
    """
    of_pass: Dict[str, List[int]] = defaultdict(list)
    for index, buffer in enumerate(buffers):
        if buffer.layer:
            of_pass[buffer.layer].append(index)
    groups = sorted((np.array(indices) for indices in of_pass.values()), key=lambda group: (int(boxes.lower[group].min()), int(group[0])))
    starts = [int(boxes.lower[group].min()) for group in groups]
    inside = []
    for at, group in enumerate(groups):
        stop = starts[at + 1] if at + 1 < len(groups) else int(boxes.upper[group].max())
        members = group[boxes.upper[group] <= stop]
        if len(members) > 1:
            inside.append(members[np.lexsort((boxes.upper[members], boxes.lower[members]))])
    return inside


def fold(buffers: Sequence[Buffer], boxes: Boxes, target_bytes: int, deadline: Deadline, settings: Settings, exact: bool) -> Optional[TwoLevels]:
    """Plans in two levels; None when no pass has anything to fold. ``exact``: both levels use the exact solver where greedy placements miss their bound."""
    inside = passes(buffers, boxes)
    if not inside:
        return None
    first = deadline.part(FIRST_LEVEL_SHARE)
    kinds = _solve_kinds([compressed(boxes.take(members)) for members in inside], first, settings, exact)
    deadline.join(first)
    folded = np.zeros(len(boxes), bool)
    for members in inside:
        folded[members] = True
    alone = np.nonzero(~folded)[0]
    blocks = Boxes(
        np.array([boxes.lower[members].min() for members in inside]),
        np.array([boxes.upper[members].max() for members in inside]),
        np.array([kinds[at].peak_bytes for at in range(len(inside))]),
    )
    step = Boxes(*(np.concatenate((of_blocks, of_rest[alone])) for of_blocks, of_rest in zip(vars(blocks).values(), vars(boxes).values())))
    second = solve(compressed(step), target_bytes, deadline, settings, exact)
    offsets = np.empty(len(boxes), np.int64)
    for at, members in enumerate(inside):
        offsets[members] = second.offsets[at] + kinds[at].offsets
    offsets[alone] = second.offsets[len(inside) :]
    distinct = list({id(kind): kind for kind in kinds}.values())
    how = tuple(f"layers by {way}" for way in dict.fromkeys(way for kind in distinct for way in kind.how))
    # The step's own proof is about folded passes. Unfolded, less may be possible: only the load is a bound.
    solution = Solution(offsets, second.peak_bytes, bound(boxes), (*how, *(f"step by {way}" for way in second.how)))
    return TwoLevels(len(distinct), solution)


def _solve_kinds(patterns: Sequence[Boxes], deadline: Deadline, settings: Settings, exact: bool) -> List[Solution]:
    """A solution for each pattern; equal patterns share one (the very same object). The time is shared out evenly."""
    signatures: List[Tuple[bytes, ...]] = [tuple(array.tobytes() for array in vars(pattern).values()) for pattern in patterns]
    solved: Dict[Tuple[bytes, ...], Solution] = {}
    kinds = len(set(signatures))
    for pattern, signature in zip(patterns, signatures):
        if signature not in solved:
            part = deadline.part(1 / kinds)
            solved[signature] = solve(pattern, 0, part, settings, exact)
            deadline.join(part)
    return [solved[signature] for signature in signatures]
