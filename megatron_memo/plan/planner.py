"""From buffers to a checked plan: the one entry that others call."""

from __future__ import annotations

import time
from enum import Enum
from typing import NamedTuple, Optional, Sequence

from .apart import solve_apart
from .boxes import Deadline, bound, boxes_of
from .errors import TraceError
from .one_level import Solution, solve
from .records import Buffer, Plan, Settings
from .two_level import fold
from .validator import require_valid


class Way(Enum):
    """What is solved as one problem."""

    TWO_LEVELS = "each kind of layer pass, then the step"
    ONE_LEVEL = "all buffers"
    APART = "all but crumbs, which come on top"


class Stage(NamedTuple):
    """One attempt: greedy placements only, or with the exact solver; ``share`` is what it may take of the time."""

    way: Way
    exact: bool
    share: float


# In this order until one meets the target: cheap before dear, and what folding layers costs in memory others may win back.
STAGES = (
    Stage(Way.TWO_LEVELS, False, 0.4),
    Stage(Way.ONE_LEVEL, False, 0.6),
    Stage(Way.APART, False, 0.4),
    Stage(Way.TWO_LEVELS, True, 0.3),
    Stage(Way.APART, True, 0.3),
    Stage(Way.ONE_LEVEL, True, 1.0),
)


def make_plan(buffers: Sequence[Buffer], settings: Settings = Settings()) -> Plan:
    """Plans ``buffers`` in the time that ``settings`` gives, and has the plan checked before it is returned.

    Buffers with layers are planned in two levels; if that misses the bound (or the capacity), and for traces without layers, all together. The exact
    solver is asked where greedy placements miss, at both levels and for the whole.
    There always is a plan; whether its peak fits a capacity is the caller's to see.

    Raises TraceError for buffers that cannot be planned, and InvalidPlanError if the planner is at fault.
    """
    begin = time.monotonic()
    _require_buffers(buffers, settings)
    deadline = Deadline(settings.seconds)
    boxes = boxes_of(buffers, settings.alignment_bytes)
    lowest = proven = bound(boxes)
    target = max(lowest, settings.capacity_bytes or 0)
    best: Optional[Solution] = None
    layer_kinds = 0
    for stage in STAGES:
        if best is not None and (best.peak_bytes <= max(target, proven) or deadline.over()):
            break
        part = deadline.part(stage.share)
        kinds, found = 0, None
        if stage.way is Way.TWO_LEVELS:
            kinds, found = fold(buffers, boxes, target, part, settings, stage.exact) or (0, None)
        elif stage.way is Way.ONE_LEVEL:
            found = solve(boxes, target, part, settings, stage.exact, best if stage.exact else None)
        else:
            found = solve_apart(boxes, target, part, settings, stage.exact)
        deadline.join(part)
        if found is None:
            continue
        proven = max(proven, found.proven_bytes)
        if best is None or found.peak_bytes < best.peak_bytes:
            best, layer_kinds = found, kinds
    assert best is not None, "one level always has a placement"
    plan = Plan(
        offsets_bytes=tuple(best.offsets.tolist()),
        peak_bytes=best.peak_bytes,
        bound_bytes=lowest,
        proven_bytes=min(proven, best.peak_bytes),
        method=", ".join(best.how),
        layer_kinds=layer_kinds,
        repeatable=not deadline.cut_short,
        seconds=time.monotonic() - begin,
        alignment_bytes=settings.alignment_bytes,
    )
    return require_valid(buffers, plan)


def _require_buffers(buffers: Sequence[Buffer], settings: Settings) -> None:
    """Raises TraceError for buffers or settings that make no problem. A trace read from a file has been looked at; one that was recorded has not."""
    if not buffers:
        raise TraceError("the trace: expected at least one buffer; found none. Record a step that allocates.")
    if settings.alignment_bytes < 1 or settings.seconds <= 0:
        raise TraceError(f"settings: expected an alignment of at least 1 byte and more than 0 seconds; found {settings}. Correct them.")
    if settings.workers is not None and settings.workers < 1:
        raise TraceError(f"settings: expected at least 1 worker; found {settings.workers}. None means all cores.")
    for buffer in buffers:
        if buffer.lower >= buffer.upper or buffer.size_bytes < 1:
            raise TraceError(
                f"buffer {buffer.id}: expected lower below upper and at least 1 byte; found [{buffer.lower}, {buffer.upper}), {buffer.size_bytes} bytes. "
                "Leave requests out that are empty or were never alive."
            )
    if len({buffer.id for buffer in buffers}) < len(buffers):
        raise TraceError(f"the trace: expected an id of its own for each of {len(buffers)} buffers; found some twice. Number the requests.")
    total_bytes = sum(-(-buffer.size_bytes // settings.alignment_bytes) * settings.alignment_bytes for buffer in buffers)
    if total_bytes >= 2**62:
        raise TraceError(f"the trace: expected sizes that add up to less than 2^62 bytes; found {total_bytes}. Sizes are in bytes.")
