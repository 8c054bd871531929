"""Random numbers of a recomputed tile: the ones that its forward pass drew.

torch keeps one generator for the device; Megatron's tracker keeps the states of others and puts them in its place for a while. A tile that
runs again must find all of them as they were, and leave no trace.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Dict, Iterator, Optional

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """States of the CPU's and the device's generators, and of those that Megatron's tracker keeps, by name. Small tensors in host memory."""

    host: Tensor
    device: Optional[Tensor]
    tracker: Dict[str, Any]

    def equals(self, other: "RandomState") -> bool:
        """Whether the same numbers come next."""
        if self.tracker.keys() != other.tracker.keys() or (self.device is None) != (other.device is None):
            return False
        pairs = [(self.host, other.host), *((self.tracker[name], other.tracker[name]) for name in self.tracker)]
        if self.device is not None:
            pairs.append((self.device, other.device))
        return all(torch.equal(a, b) for a, b in pairs)


def current() -> RandomState:
    """The states as they are now. Waits for nothing on the device."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return RandomState(torch.get_rng_state(), device, dict(get_cuda_rng_tracker().get_states()))


def restore(state: RandomState) -> None:
    """Sets all states to ``state``."""
    get_cuda_rng_tracker().set_states(dict(state.tracker))
    torch.set_rng_state(state.host)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device)


@contextmanager
def replayed(state: RandomState) -> Iterator[None]:
    """The block draws what came after ``state``; after it, numbers go on as if it had drawn none."""
    here = current()
    restore(state)
    try:
        yield
    finally:
        restore(here)


@contextmanager
def preserved() -> Iterator[None]:
    """The block draws as it likes; after it, numbers go on as if it had drawn none."""
    with replayed(current()):
        yield
