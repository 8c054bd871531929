"""Plain records of the planner, with units. Time is counted in requests: the n-th allocation or free of the recorded step is instant n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class Buffer:
    """One memory request, from its allocation to its free.

    Attributes:
        id: a name that no other buffer of the trace has.
        lower: instant from which the buffer is alive.
        upper: first instant at which it is not alive any more; above ``lower``.
        size_bytes: above 0.
        layer: which pass over which layer asked for it, as "3/forward" or "12/backward of micro-batch 1": what stands before the first slash
            is the layer (and its colour), the whole is the pass. Empty: the step itself asked (embedding, loss).
    """

    id: str
    lower: int
    upper: int
    size_bytes: int
    layer: str = ""


@dataclass(frozen=True)
class Settings:
    """How to plan.

    Attributes:
        seconds: wall time for the whole plan. The best plan found by then is returned; there always is one.
        capacity_bytes: stop as soon as the plan fits this; None: make the peak as small as possible.
        alignment_bytes: every offset is a multiple of it, and sizes are rounded up to it.
        workers: threads of the exact solver; None: all cores that this process may use. Changes how long a search takes, not what it finds.
        seed: of the exact solver and of the randomised placements.
    """

    seconds: float = 60.0
    capacity_bytes: Optional[int] = None
    alignment_bytes: int = 1
    workers: Optional[int] = None
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """Where each buffer lies in the arena.

    Attributes:
        offsets_bytes: one a buffer, in the order of the buffers that were planned.
        peak_bytes: bytes that the arena needs.
        bound_bytes: the largest sum of sizes alive at one instant (rounded up to the alignment). No plan needs less.
        proven_bytes: what is proved that no plan can go below; at least ``bound_bytes``.
        method: how the plan was found, for people.
        layer_kinds: how many different layer passes were solved for the first level; 0 when the plan has one level.
        repeatable: the clock did not decide where a search ended, so the same settings give the same plan again.
        seconds: how long it took.
        alignment_bytes: as in :class:`Settings`.
    """

    offsets_bytes: Tuple[int, ...]
    peak_bytes: int
    bound_bytes: int
    proven_bytes: int
    method: str
    layer_kinds: int
    repeatable: bool
    seconds: float
    alignment_bytes: int = 1

    @property
    def proved(self) -> bool:
        """No plan has a smaller peak."""
        return self.peak_bytes == self.proven_bytes

    @property
    def ratio(self) -> float:
        """Peak over bound; 1.0 wastes nothing."""
        return self.peak_bytes / self.bound_bytes
