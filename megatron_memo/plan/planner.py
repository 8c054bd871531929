"""From buffers to a checked plan: the one entry that others call."""

from __future__ import annotations

import time
from typing import Optional, Sequence

from . import one_level, two_level
from .boxes import Deadline, bound, boxes_of
from .errors import TraceError
from .one_level import Solution
from .records import Buffer, Plan, Settings
from .validator import require_valid

# What two levels may take of the time, each time they are tried; the rest is for all buffers in one level.
FOLDED_SHARE = 0.4


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
    greedy: Optional[Solution] = None
    # Cheap before dear; what folding costs in memory, one level may win back.
    for levels, exact in ((2, False), (1, False), (2, True), (1, True)):
        if best is not None and (best.peak_bytes <= target or deadline.over()):
            break
        if levels == 2:
            part = deadline.part(FOLDED_SHARE)
            folded = two_level.fold(buffers, boxes, target, part, settings, exact)
            deadline.join(part)
            if folded is not None and (best is None or folded.solution.peak_bytes < best.peak_bytes):
                best, layer_kinds = folded.solution, folded.layer_kinds
        else:
            whole = one_level.solve(boxes, target, deadline, settings, exact, greedy)
            greedy = greedy or whole
            proven = max(proven, whole.proven_bytes)
            if best is None or whole.peak_bytes < best.peak_bytes:
                best, layer_kinds = whole, 0
    assert best is not None
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
