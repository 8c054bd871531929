"""Checks a plan without anything that made it: one sweep over time, plain Python, no import but the records.

At any instant the live buffers are kept sorted by address. As long as they do not overlap, a new one can only overlap its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import Enum
from typing import List, Optional, Sequence, Tuple

from .errors import InvalidPlanError
from .records import Buffer, Plan


class Fault(Enum):
    """The ways in which a plan can be wrong."""

    COUNT = "a plan needs one offset a buffer"
    LIFETIME = "a buffer must be alive for at least one instant and have at least one byte"
    NEGATIVE = "offsets start at 0"
    ALIGNMENT = "offsets are multiples of the alignment"
    OVERLAP = "buffers that are alive at the same time may not share a byte"
    PEAK = "the peak is the largest end of a buffer"
    BOUND = "the bound is the largest sum of live sizes"
    PROOF = "what is proved lies between bound and peak"
    CAPACITY = "the peak may not exceed the capacity"


@dataclass(frozen=True)
class Finding:
    """What is wrong first, and where."""

    fault: Fault
    where: str


def find_fault(buffers: Sequence[Buffer], plan: Plan, capacity_bytes: Optional[int] = None) -> Optional[Finding]:
    """The first fault of ``plan`` for ``buffers``; None when it has none. Takes n log n steps, whatever made the plan."""
    step = plan.alignment_bytes
    if len(plan.offsets_bytes) != len(buffers):
        return Finding(Fault.COUNT, f"{len(buffers)} buffers, {len(plan.offsets_bytes)} offsets")
    if step < 1:
        return Finding(Fault.ALIGNMENT, f"an alignment of {step} bytes")
    ends: List[int] = []
    events: List[Tuple[int, int, int]] = []
    for index, (buffer, offset) in enumerate(zip(buffers, plan.offsets_bytes)):
        if buffer.lower >= buffer.upper or buffer.size_bytes < 1:
            return Finding(Fault.LIFETIME, f"buffer {buffer.id}: [{buffer.lower}, {buffer.upper}), {buffer.size_bytes} bytes")
        if offset < 0:
            return Finding(Fault.NEGATIVE, f"buffer {buffer.id} at {offset}")
        if offset % step:
            return Finding(Fault.ALIGNMENT, f"buffer {buffer.id} at {offset}, alignment {step}")
        ends.append(offset + (buffer.size_bytes + step - 1) // step * step)
        # A buffer that ends at an instant makes room for one that begins there: ends (0) sort before beginnings (1).
        events.append((buffer.upper, 0, index))
        events.append((buffer.lower, 1, index))
    events.sort()
    live: List[Tuple[int, int]] = []  # (offset, index), sorted
    load_bytes = bound_bytes = 0
    for instant, begins, index in events:
        offset = plan.offsets_bytes[index]
        extent = ends[index] - offset
        if not begins:
            live.pop(bisect_left(live, (offset, index)))
            load_bytes -= extent
            continue
        place = bisect_left(live, (offset, index))
        for other_place in (place - 1, place):
            if 0 <= other_place < len(live):
                other_offset, other = live[other_place]
                if other_offset < ends[index] and offset < ends[other]:
                    where = f"instant {instant}: {buffers[index].id} at [{offset}, {ends[index]}), {buffers[other].id} at [{other_offset}, {ends[other]})"
                    return Finding(Fault.OVERLAP, where)
        insort(live, (offset, index))
        load_bytes += extent
        bound_bytes = max(bound_bytes, load_bytes)
    peak_bytes = max(ends, default=0)
    if plan.peak_bytes != peak_bytes:
        return Finding(Fault.PEAK, f"the plan says {plan.peak_bytes} bytes, its buffers end at {peak_bytes}")
    if plan.bound_bytes != bound_bytes:
        return Finding(Fault.BOUND, f"the plan says {plan.bound_bytes} bytes, at most {bound_bytes} are alive at once")
    if not bound_bytes <= plan.proven_bytes <= peak_bytes:
        return Finding(Fault.PROOF, f"bound {bound_bytes}, said to be proved {plan.proven_bytes}, peak {peak_bytes} bytes")
    if capacity_bytes is not None and peak_bytes > capacity_bytes:
        return Finding(Fault.CAPACITY, f"peak {peak_bytes}, capacity {capacity_bytes} bytes")
    return None


def require_valid(buffers: Sequence[Buffer], plan: Plan, capacity_bytes: Optional[int] = None) -> Plan:
    """Returns ``plan``. Raises InvalidPlanError when anything is wrong with it."""
    finding = find_fault(buffers, plan, capacity_bytes)
    if finding is not None:
        raise InvalidPlanError(
            f"the plan found by {plan.method} must not be used: expected that {finding.fault.value}; found {finding.where}. "
            "Train without a plan, and report the trace: a planner that makes such a plan is at fault."
        )
    return plan
