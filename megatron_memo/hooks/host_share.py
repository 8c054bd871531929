"""How much host memory this rank's passes take, and that they get it, or which alpha would fit."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Optional, Sequence

import torch

from ..config import MemoConfig
from ..swap.host_memory import Budget, HostMemoryRanOut, budget_bytes, local_ranks, read_limits, shortage_error
from ..swap.pinned import PinnedBuffer
from ..swap.schedule import Schedule, host_bytes


@dataclass(frozen=True)
class Measured:
    """Bytes of one forward pass of one layer under the run's policy.

    Attributes:
        kept_bytes, swapped_bytes, recomputed_bytes: by what becomes of them.
        io_bytes: goes to the host whatever alpha is: the layer's input and attention's output.
        rest_bytes: what alpha and keep divide.
    """

    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    io_bytes: int
    rest_bytes: int

    def swapped_bytes_at(self, alpha: float) -> int:
        """What a pass would send with another fraction of swapped tokens; nothing where the layer is resident."""
        return int(self.io_bytes + alpha * self.rest_bytes) if self.swapped_bytes else 0


def host_buffer(measured: Sequence[Sequence[Measured]], schedule: Schedule, config: MemoConfig, device: torch.device) -> PinnedBuffer:
    """Exactly the host memory that the passes of ``schedule`` need; ``measured[chunk][layer]``. Collective over all ranks.

    Raises:
        HostMemoryError: there is less. It names the largest alpha that would fit.
    """

    def needed_at(alpha: float) -> int:
        return host_bytes(schedule, [[layer.swapped_bytes_at(alpha) for layer in chunk] for chunk in measured])

    needed_bytes = host_bytes(schedule, [[layer.swapped_bytes for layer in chunk] for chunk in measured])
    limits = read_limits()
    # Ranks share what the node has left. The exchange also makes sure that all have read it before any takes some.
    budget = budget_bytes(limits, local_ranks(), config.host_gib, _share_of_node(needed_bytes))
    if budget.size_bytes is None or needed_bytes <= budget.size_bytes:
        try:
            return PinnedBuffer(needed_bytes, pin=device.type == "cuda", device_index=device.index)
        except HostMemoryRanOut as error:
            budget = Budget(error.there_bytes, f"taken until memory ran out: {error}", local_ranks())
    fits = next((percent / 100 for percent in range(int(config.alpha * 100), -1, -1) if needed_at(percent / 100) <= budget.size_bytes), None)
    raise shortage_error(needed_bytes, budget, fits)


def _share_of_node(needed_bytes: int) -> Optional[float]:
    """This rank's part of what the ranks on its node need together: an earlier pipeline stage has more passes in flight than a later one.

    None where that is not known: all then count as equal.
    """
    if not torch.distributed.is_initialized():
        return None
    node = socket.gethostname()
    mine = (node, os.environ.get("RANK", ""), os.getpid())
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (mine, needed_bytes))
    needs = {rank: size_bytes for rank, size_bytes in found if rank[0] == node}
    total_bytes = sum(needs.values())
    return needs[mine] / total_bytes if len(needs) >= local_ranks() and total_bytes else None
