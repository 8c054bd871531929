"""The exact solver: CP-SAT with one AddNoOverlap2D, times fixed and offsets free.

Repeatable with any number of threads: CP-SAT's interleaved search hands its strategies out in batches of fixed size and lets them exchange what they
found between batches only, and effort is limited in CP-SAT's deterministic time, which counts work. The wall clock is a limit too; where it ends a
search first, the deadline notes that.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import List, NamedTuple, Optional

import numpy as np

from .boxes import Boxes, Deadline, compressed

# CP-SAT's deterministic seconds a second of deadline. So many that the wall clock usually ends a search, as a user who gave it seconds expects.
EFFORT_PER_SECOND = 8.0
_BATCH = 8
_LEAST_SECONDS = 0.02


class Answer(Enum):
    """What the search says about the question that was put."""

    BEST = "proved that no smaller peak exists"
    FOUND = "a placement"
    NONE = "proved that there is none"
    UNKNOWN = "time ran out"


class Exact(NamedTuple):
    """``offsets`` in bytes, where there is a placement; ``bound_bytes``: no peak below it, as far as this search proved."""

    answer: Answer
    offsets: Optional[np.ndarray]
    bound_bytes: int


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def within(boxes: Boxes, capacity_bytes: int, deadline: Deadline, workers: Optional[int], seed: int) -> Exact:
    """Asks for any placement whose peak is at most ``capacity_bytes``."""
    return _solve(boxes, capacity_bytes, None, None, deadline, workers, seed)


def smallest(boxes: Boxes, hint: np.ndarray, bound_bytes: int, below_bytes: int, deadline: Deadline, workers: Optional[int], seed: int) -> Exact:
    """Asks for the smallest peak, known to be at least ``bound_bytes`` and wanted below ``below_bytes``; ``hint`` are offsets to start from."""
    return _solve(boxes, below_bytes - 1, bound_bytes, hint, deadline, workers, seed)


def _solve(
    boxes: Boxes, capacity_bytes: int, minimise_from_bytes: Optional[int], hint: Optional[np.ndarray], deadline: Deadline, workers: Optional[int], seed: int
) -> Exact:
    """One search. With ``minimise_from_bytes`` the peak is made small, no smaller than that; else any placement within the capacity will do."""
    from ortools.sat.python import cp_model

    seconds = deadline.left_s()
    known = minimise_from_bytes or 0
    if seconds < _LEAST_SECONDS:
        deadline.cut_short = True
        return Exact(Answer.UNKNOWN, None, known)
    # Some best placement is pushed down until each box rests on another one, so every offset is a sum of sizes: a multiple of their common divisor.
    unit = int(np.gcd.reduce(boxes.size))
    height = capacity_bytes // unit
    times, size = compressed(boxes), (boxes.size // unit).tolist()
    if max(size) > height:
        return Exact(Answer.NONE, None, (height + 1) * unit)
    model = cp_model.CpModel()
    at = [model.new_int_var(0, height - s, "") for s in size]
    alive = [model.new_fixed_size_interval_var(int(a), int(b - a), "") for a, b in zip(times.lower, times.upper)]
    model.add_no_overlap_2d(alive, [model.new_fixed_size_interval_var(y, s, "") for y, s in zip(at, size)])
    _break_symmetries(model, at, times, size, height if minimise_from_bytes is None else None)
    top = None
    if minimise_from_bytes is not None:
        top = model.new_int_var(-(-minimise_from_bytes // unit), height, "")
        for y, s in zip(at, size):
            model.add(y + s <= top)
        model.add_cumulative(alive, size, top)
        model.minimize(top)
    if hint is not None:
        for y, s, offset in zip(at, size, hint.tolist()):
            model.add_hint(y, min(offset // unit, height - s))
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.interleave_search = True
    parameters.interleave_batch_size = _BATCH
    parameters.num_workers = workers or cores()
    parameters.random_seed = seed
    parameters.max_deterministic_time = EFFORT_PER_SECOND * deadline.seconds
    parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.INFEASIBLE) and solver.wall_time >= seconds:
        deadline.cut_short = True
    if status == cp_model.INFEASIBLE:
        return Exact(Answer.NONE, None, max(known, (height + 1) * unit))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(Answer.UNKNOWN, None, known)
    offsets = np.array([solver.value(y) for y in at], np.int64) * unit
    if top is None:
        return Exact(Answer.FOUND, offsets, known)
    proven = max(known, int(np.ceil(solver.best_objective_bound)) * unit)
    return Exact(Answer.BEST if status == cp_model.OPTIMAL else Answer.FOUND, offsets, proven)


def _break_symmetries(model: object, at: List[object], times: Boxes, size: List[int], height: Optional[int]) -> None:
    """Equal boxes in order of index; and, for a fixed ``height``, the box of largest area in the lower half, since any placement may be turned over."""
    seen: dict = {}
    for y, key in zip(at, zip(times.lower.tolist(), times.upper.tolist(), size)):
        if key in seen:
            model.add(seen[key] + key[2] <= y)
        seen[key] = y
    if height is not None:
        largest = int(np.argmax((times.upper - times.lower) * np.array(size, float)))
        model.add(2 * at[largest] + size[largest] <= height)
