"""One piece of host memory, taken once and pinned once.

PyTorch's pinned allocator rounds up to powers of two, and a plain first touch by one thread takes most of a minute for 100 GiB. Here:
an anonymous mapping with huge pages, near the GPU, touched by several threads and registered in one call.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Callable, Dict, Optional

import torch

from ..errors import HostMemoryError
from . import host_memory, numa
from .host_memory import GIB, HostMemoryRanOut

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 1 << 30
_RESERVE_BYTES = 1 << 30
_PATIENCE_S = 10.0
_POLL_S = 0.05
# Less growth than this is the noise of other processes.
_GROWTH_BYTES = 16 << 20
_MAX_THREADS = 16
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


class PinnedBuffer:
    """``size_bytes`` of host memory as a flat byte tensor. A context manager that closes at its end.

    Args:
        size_bytes: may be 0.
        pin: register it with CUDA, so that copies run beside computation.
        device_index: the GPU whose NUMA node the memory goes to; None is the current one.
        available_bytes: what is free now; asked between chunks, so that the kernel never has to kill the process.
        cudart: CUDA's runtime, for tests.
        patience_s: how long to wait for memory that does not grow.
        threads: how many touch the memory; None takes the processors of this process.
        local_ranks: ranks that take memory at the same time; None asks the environment.

    Attributes:
        tensor: uint8 [size_bytes], valid until :meth:`close`. Without a call of it the memory lives as long as the buffer or any view of the tensor.
        numa_node: the node that the memory was asked from, or None.
        phase_s: seconds that each of "map", "touch" and "register" took.

    Raises:
        HostMemoryError: the memory cannot be mapped, or CUDA refuses to register it. Nothing stays allocated.
        HostMemoryRanOut: there is not enough of it. Nothing stays allocated.
    """

    def __init__(
        self,
        size_bytes: int,
        pin: bool,
        device_index: Optional[int] = None,
        available_bytes: Callable[[], int] = host_memory.free_bytes,
        cudart: Any = None,
        patience_s: float = _PATIENCE_S,
        threads: Optional[int] = None,
        local_ranks: Optional[int] = None,
    ) -> None:
        if size_bytes < 0:
            raise ValueError(f"size_bytes: expected 0 or more bytes, found {size_bytes}")
        self.size_bytes = size_bytes
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.numa_node: Optional[int] = None
        self.phase_s: Dict[str, float] = {"map": 0.0, "touch": 0.0, "register": 0.0}
        self._release: Optional[Callable[[], Any]] = None
        if size_bytes == 0:
            return
        started = time.perf_counter()
        region = _Region(size_bytes)
        try:
            node = _gpu_node(device_index) if pin and cudart is None else None
            self.numa_node = node if numa.prefer(region.address, region.size_bytes, node) else None
            mapped = time.perf_counter()
            ranks = host_memory.local_ranks() if local_ranks is None else local_ranks
            _touch(region, threads or _processors(), lambda taken, chunk: _wait_for_memory(size_bytes, taken, chunk, ranks, available_bytes, patience_s))
            touched = time.perf_counter()
            if pin:
                region.register(cudart, device_index)
            self.phase_s = {"map": mapped - started, "touch": touched - mapped, "register": time.perf_counter() - touched}
            memory = (ctypes.c_uint8 * size_bytes).from_address(region.address)
            # The tensor and its views hold ``memory``, so the pages cannot go before the last of them does.
            finalizer = weakref.finalize(memory, region.release)
        except BaseException:
            region.release()
            raise
        finalizer.atexit = False  # the kernel takes everything back by itself, when no copy runs any more
        self._release = finalizer
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Unregisters and unmaps, after the device's copies are over. Views of the tensor must not be used any more. Calling it twice does nothing."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._release is not None:
            self._release()

    def __enter__(self) -> "PinnedBuffer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class _Region:
    """Whole huge pages of anonymous memory that a forked child does not have."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = _round_up(size_bytes)
        self._pid = os.getpid()
        self._cudart: Any = None
        self._device_index: Optional[int] = None
        # One page more than needed, to start at a huge page's boundary: it is never touched.
        self._mapped_bytes = self.size_bytes + _HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._base = _libc.mmap(None, self._mapped_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if self._base is None or self._base == ctypes.c_void_p(-1).value:
            self._base = None
            raise HostMemoryError(
                f"{size_bytes / GIB:.3f} GiB of host address space cannot be mapped: {os.strerror(ctypes.get_errno())}. "
                "Look at ulimit -v and vm.overcommit_memory, or lower --memo-alpha."
            )
        self.address = _round_up(self._base)
        _libc.madvise(self._base, self._mapped_bytes, _MADV_HUGEPAGE)  # refused by kernels without huge pages: slower, not wrong
        # Loader workers and asynchronous checkpoints fork. A child that shares the pages makes the parent's next write move to a new page,
        # while the device keeps writing to the old one.
        if _libc.madvise(self._base, self._mapped_bytes, _MADV_DONTFORK) != 0:
            message = os.strerror(ctypes.get_errno())
            self.release()
            raise HostMemoryError(f"host memory for swapped activations cannot be kept from forked processes: madvise(MADV_DONTFORK): {message}.")

    def register(self, cudart: Any, device_index: Optional[int]) -> None:
        """In one call: CUDA refuses a copy that touches two registered ranges (cudaErrorInvalidValue), so parts side by side will not do."""
        current = torch.cuda.device(device_index) if cudart is None and device_index is not None else nullcontext()
        cudart = torch.cuda.cudart() if cudart is None else cudart
        with current:
            code = cudart.cudaHostRegister(self.address, self.size_bytes, 0)
        if int(code) != 0:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.3f} GiB"
            raise HostMemoryError(
                f"CUDA could not pin {self.size_bytes / GIB:.3f} GiB of host memory (cudaHostRegister: error {int(code)}, "
                f"{cudart.cudaGetErrorString(code)}; locked memory allowed by ulimit -l: {allowed}). Raise the limit or lower --memo-alpha."
            )
        self._cudart, self._device_index = cudart, device_index

    def release(self) -> None:
        """Unregisters, then unmaps. A forked child has no such memory: what is at its addresses there is not ours."""
        if self._base is None or os.getpid() != self._pid:
            return
        if self._cudart is not None:
            if torch.cuda.is_initialized():
                try:
                    torch.cuda.synchronize(self._device_index)
                except RuntimeError:
                    pass  # a device that has failed copies nothing any more
            self._cudart.cudaHostUnregister(self.address)
            self._cudart = None
        _libc.munmap(self._base, self._mapped_bytes)
        self._base = None


def _processors() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _gpu_node(device_index: Optional[int]) -> Optional[int]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device_index is None else device_index)
    return numa.node_of(numa.pci_address(properties))


def _touch(region: _Region, threads: int, before: Callable[[int, int], None]) -> None:
    """Gives every page of the region memory, chunk by chunk. ``before(bytes taken, bytes of the next chunk)`` may raise."""
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, region.size_bytes, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, region.size_bytes)
            before(start, stop - start)
            share = _round_up(-(-(stop - start) // threads))
            pieces = [(region.address + begin, min(share, stop - begin)) for begin in range(start, stop, share)]
            list(pool.map(lambda piece: _populate(*piece), pieces))


def _populate(address: int, size_bytes: int) -> None:
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        # Touching the pages now would end the process with a signal instead.
        raise HostMemoryError(f"the kernel gave no {size_bytes / GIB:.3f} GiB of host memory: {os.strerror(code)}. Lower --memo-alpha.")
    ctypes.memset(address, 0, size_bytes)  # a kernel before 5.14


def _wait_for_memory(
    size_bytes: int, taken_bytes: int, chunk_bytes: int, ranks: int, available_bytes: Callable[[], int], patience_s: float
) -> None:
    """Returns when the next chunk of every rank fits. Memory of a virtual machine may grow while it is used: no sign of that for a while means
    there is no more. Raises HostMemoryRanOut."""
    reserve_bytes = min(_RESERVE_BYTES, chunk_bytes)
    best = now = available_bytes()
    deadline = time.monotonic() + patience_s
    while now < ranks * chunk_bytes + reserve_bytes:
        if now >= best + _GROWTH_BYTES:
            best, deadline = now, time.monotonic() + patience_s
        if time.monotonic() > deadline:
            raise HostMemoryRanOut(
                f"host memory ran out: {size_bytes / GIB:.3f} GiB are needed for swapped activations on each of {ranks} local ranks, "
                f"{taken_bytes / GIB:.3f} GiB were taken by this one, {now / GIB:.3f} GiB are free now for all and did not grow for {patience_s:g} s. "
                "Lower --memo-alpha, keep more layers on the GPU (--memo-keep-layers), or use a machine with more host memory.",
                there_bytes=taken_bytes + max(0, now - reserve_bytes) // ranks,
            )
        time.sleep(_POLL_S)
        now = available_bytes()
