"""The exact solver: CP-SAT with one AddNoOverlap2D, times fixed and offsets free, asked whether a placement within a capacity exists.

Several searches run side by side, one thread each, so that all cores work; they differ in how they branch, because hard cases are easy for
some and hopeless for others. The answer is the same with any number of threads: searches are numbered, each is limited by CP-SAT's deterministic time,
which counts work, and of those that decide the question the one with the lowest number counts, wherever another one was faster. Searches
with higher numbers are stopped, lower ones are waited for. Then all start again with more effort, some in a newly shuffled order. CP-SAT's own
interleaved search is repeatable too, but waits for the slowest of every batch, found or not: on minimalloc's instance K 9.6 s instead of 1.6.
The wall clock limits everything; where it ends a search that might have counted, the deadline notes that.
"""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from enum import Enum
from itertools import count
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from .boxes import Boxes, Deadline, compressed, load
from .greedy import orders

# CP-SAT's deterministic seconds of one search in the first round. A second of the clock is about 0.02 of them with AddNoOverlap2D.
FIRST_EFFORT = 0.02
GROWTH = 4
# All searches of a question together, for each second of its deadline: what two quiet cores manage, so that there the clock decides nothing.
EFFORT_PER_SECOND = 0.03
# How far boxes drift in a shuffled order, as a fraction of all.
SHUFFLE = 0.1
_LEAST_SECONDS = 0.02
_LOOK_S = 0.02


class Answer(Enum):
    """What the search says about the capacity that was asked for."""

    FOUND = "a placement"
    NONE = "proved that there is none"
    UNKNOWN = "time ran out"


class Exact(NamedTuple):
    """``offsets`` in bytes if FOUND; ``bound_bytes``: a peak that no placement can go below, as far as this search proved (0: nothing)."""

    answer: Answer
    offsets: Optional[np.ndarray] = None
    bound_bytes: int = 0


class Branching(NamedTuple):
    """How a search chooses: CP-SAT's name for it; for FIXED_SEARCH, which box of those equally low comes first, and whether that order is shuffled a little."""

    search: str
    order: str = ""
    shuffled: bool = False


# Lowest offset first, as greedy.lowest_first does, with backtracking, is what solves most traces at once; which order it needs cannot be told beforehand.
BRANCHINGS = (
    Branching("FIXED_SEARCH", "life"),
    Branching("FIXED_SEARCH", "area"),
    Branching("FIXED_SEARCH", "pressure, life"),
    Branching("FIXED_SEARCH", "pressure, area"),
    Branching("FIXED_SEARCH", "size"),
    Branching("PORTFOLIO_WITH_QUICK_RESTART_SEARCH"),
    Branching("FIXED_SEARCH", "life", shuffled=True),
    Branching("FIXED_SEARCH", "area", shuffled=True),
)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pairs_alive(boxes: Boxes) -> int:
    """How many pairs of compressed boxes are alive together: the size of the exact model."""
    alive = load(Boxes(boxes.lower, boxes.upper, np.ones(len(boxes), np.int64)))
    born = np.bincount(boxes.lower, minlength=len(alive))
    # Of `born` boxes at an instant each meets those that were there before, and the others that are born with it.
    return int((born * (alive - born) + born * (born - 1) // 2).sum())


def within(boxes: Boxes, capacity_bytes: int, deadline: Deadline, workers: Optional[int], seed: int) -> Exact:
    """Asks for any placement of compressed ``boxes`` whose peak is at most ``capacity_bytes``."""
    # Some best placement is pushed down until each box rests on another one, so every offset is a sum of sizes: a multiple of their common divisor.
    unit = int(np.gcd.reduce(boxes.size))
    height = capacity_bytes // unit
    if int(load(boxes).max()) > height * unit:
        return Exact(Answer.NONE, bound_bytes=(height + 1) * unit)
    problem = _Problem(boxes, boxes.size // unit, height)
    spent = 0.0
    with ThreadPoolExecutor(workers or cores()) as pool:
        for round_ in count():
            effort = FIRST_EFFORT * GROWTH**round_
            if spent >= EFFORT_PER_SECOND * deadline.seconds:
                return Exact(Answer.UNKNOWN)
            if deadline.left_s() < _LEAST_SECONDS:
                deadline.cut_short = True
                return Exact(Answer.UNKNOWN)
            searches = [_Search(problem, branching, effort, seed + 1000 * round_ + at) for at, branching in enumerate(BRANCHINGS)]
            winner = _race(searches, pool, deadline)
            if winner is not None:
                if winner.offsets is None:
                    return Exact(Answer.NONE, bound_bytes=(height + 1) * unit)
                return Exact(Answer.FOUND, winner.offsets * unit)
            spent += effort * len(searches)


def _race(searches: Sequence["_Search"], pool: ThreadPoolExecutor, deadline: Deadline) -> Optional["_Search"]:
    """Runs all; gives the decided one with the lowest number, or None."""
    futures: List[Future] = [pool.submit(search.run, deadline) for search in searches]
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()  # an error in a search is an error of the planner
        decided = [at for at, search in enumerate(searches) if search.decided]
        # Stopped again and again: a search that is just being built does not hear it the first time.
        for search in searches[decided[0] + 1 :] if decided else ():
            search.stop()
    for at, search in enumerate(searches):
        if search.decided:
            return search
        deadline.cut_short = deadline.cut_short or search.cut_short
    return None


class _Problem(NamedTuple):
    """Boxes with sizes [boxes] in units, to be placed below ``height`` units."""

    boxes: Boxes
    size: np.ndarray
    height: int


class _Search:
    """One search by one thread.

    Attributes:
        decided: it found a placement (``offsets`` in units), or proved that there is none (``offsets`` None).
        cut_short: the clock ended it before its effort was spent.
    """

    def __init__(self, problem: _Problem, branching: Branching, effort: float, seed: int) -> None:
        self.decided = False
        self.offsets: Optional[np.ndarray] = None
        self.cut_short = False
        self._problem, self._branching, self._effort, self._seed = problem, branching, effort, seed
        self._stopped = False
        self._solver: Any = None

    def stop(self) -> None:
        self._stopped = True
        if self._solver is not None:
            self._solver.stop_search()

    def run(self, deadline: Deadline) -> None:
        """Searches until decided, stopped, or at the end of effort or time."""
        from ortools.sat.python import cp_model

        seconds = deadline.left_s()
        if self._stopped or seconds < _LEAST_SECONDS:
            self.cut_short = not self._stopped
            return
        model, at = self._model(cp_model)
        self._solver = cp_model.CpSolver()
        parameters = self._solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = self._seed
        # The linear relaxation knows no more than the load bound here, and takes most of the time.
        parameters.linearization_level = 0
        parameters.search_branching = getattr(parameters, self._branching.search)
        parameters.max_deterministic_time = self._effort
        parameters.max_time_in_seconds = seconds
        status = self._solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self.offsets = np.array([self._solver.value(y) for y in at], np.int64)
            self.decided = True
        elif status == cp_model.INFEASIBLE:
            self.decided = True
        else:
            self.cut_short = self._solver.wall_time >= seconds

    def _model(self, cp_model: Any) -> Any:
        """The CP-SAT model and its offset variables, in units."""
        boxes, size, height = self._problem
        times = compressed(boxes)
        model = cp_model.CpModel()
        at = [model.new_int_var(0, height - s, "") for s in size.tolist()]
        alive = [model.new_fixed_size_interval_var(a, b - a, "") for a, b in zip(times.lower.tolist(), times.upper.tolist())]
        model.add_no_overlap_2d(alive, [model.new_fixed_size_interval_var(y, s, "") for y, s in zip(at, size.tolist())])
        # Equal boxes are stacked in order of index. Any placement may be turned over, so the box of largest area may be taken to lie in the lower half.
        seen: Dict[Any, int] = {}
        for index, key in enumerate(zip(times.lower.tolist(), times.upper.tolist(), size.tolist())):
            if key in seen:
                model.add(at[seen[key]] + key[2] <= at[index])
            seen[key] = index
        largest = int(np.argmax((times.upper - times.lower) * size.astype(float)))
        model.add(2 * at[largest] + int(size[largest]) <= height)
        if self._branching.order:
            order = orders(boxes)[self._branching.order]
            if self._branching.shuffled:
                drift = np.random.default_rng(self._seed).normal(scale=SHUFFLE * len(order), size=len(order))
                order = order[np.argsort(np.arange(len(order)) + drift, kind="stable")]
            model.add_decision_strategy([at[index] for index in order.tolist()], cp_model.CHOOSE_LOWEST_MIN, cp_model.SELECT_MIN_VALUE)
        return model, at
