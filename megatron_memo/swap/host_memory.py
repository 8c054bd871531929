"""How much host memory one rank may take. Needs no torch.

MemAvailable alone decides nothing: a virtual machine's memory can start small and grow as it is used. A control group's limit is hard, and
the ranks of a node share it. What is below the limit is taken piece by piece, and seen (:mod:`megatron_memo.swap.pinned`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Mapping, NamedTuple, Optional, Tuple

from ..errors import HostMemoryError

GIB = 1 << 30
_MIB = 1 << 20
# Left to the rest of a rank: loaders, Python, checkpoints in flight.
_RESERVE_SHARE = 0.05
# Version 1 writes "no limit" as the largest number of whole pages.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class HostLimits:
    """What the machine says about its memory, in bytes.

    Attributes:
        limit_bytes: the tightest control-group limit of this process, less what is used under it; None where there is none.
        limit_source: the file that says so.
        available_bytes: /proc/meminfo's MemAvailable, a hint only.
        total_bytes: /proc/meminfo's MemTotal, a hint only.
        slurm_bytes: what Slurm granted the job on this node, or None. For messages: where Slurm enforces it, it does so by control groups.
    """

    limit_bytes: Optional[int]
    limit_source: str
    available_bytes: int
    total_bytes: int = 0
    slurm_bytes: Optional[int] = None


@dataclass(frozen=True)
class Budget:
    """What a rank may take. ``size_bytes`` None means: take it and see."""

    size_bytes: Optional[int]
    source: str
    local_ranks: int


class HostMemoryRanOut(HostMemoryError):
    """Memory ran out while it was being taken. ``there_bytes``: about how much this rank could have had."""

    def __init__(self, message: str, there_bytes: int) -> None:
        super().__init__(message)
        self.there_bytes = there_bytes


class _Version(NamedTuple):
    """The files of one version of control groups. ``cache``: fields of memory.stat that the kernel gives up under pressure."""

    mount: str
    limits: Tuple[str, ...]
    used: str
    cache: Tuple[str, ...]


# memory.high does not kill, but a process above it is slowed down until it is below, and pinned memory never is.
_V2 = _Version("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
_V1 = _Version("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def _lines(path: Path) -> List[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_int(path: Path) -> Optional[int]:
    """The number in a file; None where there is no such file or it holds a word ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> Mapping[str, int]:
    """The ``name value`` lines of a file."""
    pairs = (line.replace(":", " ").split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _own_groups(root: Path) -> Iterator[Tuple[_Version, str]]:
    """The control groups of this process that can limit memory: version and path."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mount(root: Path, version: _Version, path: str) -> Tuple[Path, str]:
    """Where a version's groups are mounted, and the group that is at the top of it.

    In a container the mount's top is often the container's own group, while ``path`` still is the host's path of it.
    """
    found = root / version.mount, "/"
    longest = -1
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        places, kinds = before.split(), after.split()
        if len(places) < 5 or len(kinds) < 3:
            continue
        fits = kinds[0] == "cgroup2" if version is _V2 else kinds[0] == "cgroup" and "memory" in kinds[2].split(",")
        top = places[3]
        if fits and (path + "/").startswith(top.rstrip("/") + "/") and len(top) > longest:
            found, longest = (root / places[4].lstrip("/"), top), len(top)
    return found


def _limits(root: Path) -> Iterator[Tuple[int, str]]:
    """(bytes left, file that sets the limit) of every limited control group that holds this process, ancestors included."""
    for version, path in _own_groups(root):
        top, top_path = _mount(root, version, path)
        # A path that is not there belongs to another namespace. Going up from it ends at what is mounted at the top, the process's own group.
        folder = top / path[len(top_path.rstrip("/")) :].lstrip("/")
        while True:
            statistics = _fields(folder / "memory.stat")
            cache_bytes = sum(statistics.get(name, 0) for name in version.cache)
            used_bytes = max(0, (_read_int(folder / version.used) or 0) - cache_bytes)
            for name in version.limits:
                limit_bytes = _read_int(folder / name)
                if limit_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
                    yield max(0, limit_bytes - used_bytes), str(folder / name)
            if folder == top:
                break
            folder = folder.parent


def _slurm_bytes(environ: Mapping[str, str]) -> Optional[int]:
    """Slurm counts in MiB, and writes 0 for the whole node."""

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdigit() else 0

    size_mib = number("SLURM_MEM_PER_NODE") or number("SLURM_MEM_PER_CPU") * number("SLURM_CPUS_ON_NODE")
    return size_mib * _MIB or None


def available_bytes(root: str = "/") -> int:
    """/proc/meminfo's MemAvailable in bytes; 0 where it is not there."""
    return _fields(Path(root) / "proc/meminfo").get("MemAvailable", 0) * 1024


def free_bytes(root: str = "/") -> int:
    """What can be taken at this moment without the kernel killing anyone: MemAvailable, or less where a control group allows less. In bytes."""
    return min([available_bytes(root), *(left for left, _ in _limits(Path(root)))])


def local_ranks() -> int:
    """Ranks on this node that share its memory (torchrun's LOCAL_WORLD_SIZE), at least 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def read_limits(root: str = "/", environ: Optional[Mapping[str, str]] = None) -> HostLimits:
    """The limits of this process. ``root`` stands for / and ``environ`` for the environment in tests.

    The limit counts what is in use now: read it on every rank before any rank takes its memory.
    """
    left, source = min(_limits(Path(root)), default=(None, "no control-group limit"))
    total_bytes = _fields(Path(root) / "proc/meminfo").get("MemTotal", 0) * 1024
    return HostLimits(left, source, available_bytes(root), total_bytes, _slurm_bytes(os.environ if environ is None else environ))


def budget_bytes(limits: HostLimits, local_ranks: int, asked_gib: Optional[float] = None, fraction: Optional[float] = None) -> Budget:
    """What one of ``local_ranks`` ranks may take: ``fraction`` of what the node has, or an equal part.

    ``asked_gib`` (the user's word, for each rank) is taken as it is, below a hard limit.
    """
    fraction = fraction if fraction is not None else 1 / max(1, local_ranks)
    share = None if limits.limit_bytes is None else int(limits.limit_bytes * (1 - _RESERVE_SHARE) * fraction)
    if asked_gib is not None and (share is None or asked_gib * GIB <= share):
        return Budget(int(asked_gib * GIB), "--memo-host-gib", local_ranks)
    source = limits.limit_source
    if asked_gib is not None:
        source += f", below --memo-host-gib {asked_gib:g}"
    if limits.slurm_bytes is not None:
        source += f"; Slurm granted {limits.slurm_bytes / GIB:.3f} GiB on this node"
    return Budget(share, source, local_ranks)


def shortage_error(needed_bytes: int, budget: Budget, fits_alpha: Optional[float]) -> HostMemoryError:
    """The error for a policy that needs more than there is. ``fits_alpha``: the largest --memo-alpha that would fit, or None."""
    there = "an unknown amount" if budget.size_bytes is None else f"{budget.size_bytes / GIB:.3f} GiB"
    advice = (
        f"--memo-alpha {fits_alpha:g} fits."
        if fits_alpha is not None
        else "No --memo-alpha fits: layer inputs and attention outputs alone need more. Keep more layers on the GPU (--memo-keep-layers), shorten the sequence, "
        "or use more ranks."
    )
    where = "Or raise it." if budget.source.startswith("--memo-host-gib") else "Or raise the limit of the job or container."
    return HostMemoryError(
        f"swapped activations need {needed_bytes / GIB:.3f} GiB of host memory on this rank, one of {budget.local_ranks} on its node; there are {there} "
        f"for it ({budget.source}). {advice} {where}"
    )
