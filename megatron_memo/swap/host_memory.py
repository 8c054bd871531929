"""How much host memory one rank may take. Needs no torch.

MemAvailable alone decides nothing: a virtual machine's memory can start small and grow as it is used. A control group's limit is hard, and
the ranks of a node share it. What is below the limit is taken piece by piece, and seen (:mod:`megatron_memo.swap.pinned`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

from ..errors import HostMemoryError

GIB = 1 << 30
# Left to the rest of a rank: loaders, Python, checkpoints in flight.
_RESERVE_SHARE = 0.05


@dataclass(frozen=True)
class HostLimits:
    """What the machine says about its memory, in bytes.

    Attributes:
        limit_bytes: the tightest control-group limit of this process, less what is used under it; None where there is none.
        limit_source: the file that says so.
        available_bytes: /proc/meminfo's MemAvailable, a hint only.
    """

    limit_bytes: Optional[int]
    limit_source: str
    available_bytes: int


@dataclass(frozen=True)
class Budget:
    """What a rank may take. ``size_bytes`` None means: take it and see."""

    size_bytes: Optional[int]
    source: str
    local_ranks: int


def _read_int(path: Path) -> Optional[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cache_bytes(stat: Path, key: str) -> int:
    """File cache of a control group that the kernel gives up under pressure."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get(key, 0))


def _groups(root: Path) -> Iterator[tuple]:
    """(limit bytes, used bytes, file) of every control group that holds this process, ancestors included."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines if line.count(":") >= 2}
    for controllers, base, limit, used, cache in (
        ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        path = next((p for names, p in paths.items() if controllers in names.split(",")), None)
        if path is None:
            continue
        top = root / base
        # Inside a container the path of the host may not exist: what is mounted at the top is the container's own group.
        folder = top / path if (top / path).is_dir() else top
        while True:
            limit_bytes, used_bytes = _read_int(folder / limit), _read_int(folder / used)
            if limit_bytes is not None and limit_bytes < 1 << 60:
                yield limit_bytes, max(0, (used_bytes or 0) - _cache_bytes(folder / "memory.stat", cache)), str(folder / limit)
            if folder == top:
                break
            folder = folder.parent


def available_bytes(root: str = "/") -> int:
    """/proc/meminfo's MemAvailable in bytes; 0 where it is not there."""
    try:
        lines = (Path(root) / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def read_limits(root: str = "/") -> HostLimits:
    """The limits of this process; ``root`` stands for / in tests."""
    groups = [(limit - used, source) for limit, used, source in _groups(Path(root))]
    left, source = min(groups, default=(None, "no control-group limit"))
    return HostLimits(None if left is None else max(0, left), source, available_bytes(root))


def budget_bytes(limits: HostLimits, local_ranks: int, asked_gib: Optional[float] = None) -> Budget:
    """What each of ``local_ranks`` ranks may take. ``asked_gib`` (the user's word) is taken as it is, below a hard limit."""
    share = None if limits.limit_bytes is None else int(limits.limit_bytes * (1 - _RESERVE_SHARE)) // max(1, local_ranks)
    if asked_gib is not None and (share is None or asked_gib * GIB <= share):
        return Budget(int(asked_gib * GIB), "--memo-host-gib", local_ranks)
    return Budget(share, limits.limit_source, local_ranks)


def shortage_error(needed_bytes: int, budget: Budget, fits_alpha: Optional[float]) -> HostMemoryError:
    """The error for a policy that needs more than there is. ``fits_alpha``: the largest --memo-alpha that would fit, or None."""
    there = (budget.size_bytes or 0) / GIB
    advice = (
        f"--memo-alpha {fits_alpha:g} fits."
        if fits_alpha is not None
        else "No --memo-alpha fits: layer inputs and attention outputs alone need more. Keep more layers on the GPU (--memo-keep-layers), shorten the sequence, "
        "or use more ranks."
    )
    return HostMemoryError(
        f"swapped activations need {needed_bytes / GIB:.3f} GiB of host memory on each of {budget.local_ranks} local ranks; there are {there:.3f} GiB "
        f"a rank ({budget.source}). {advice}"
    )
