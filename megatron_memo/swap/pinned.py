"""One piece of host memory, taken once and pinned once.

PyTorch's pinned allocator rounds up to powers of two, and a plain first touch by one thread takes most of a minute for 100 GiB. Here:
an anonymous mapping with huge pages, bound to the GPU's NUMA node, touched by several threads and registered in one call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from ..errors import HostMemoryError
from . import host_memory

GIB = 1 << 30
_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 1 << 30
_RESERVE_BYTES = 1 << 30
_PATIENCE_S = 10.0
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 23
_MPOL_PREFERRED, _SYS_MBIND = 1, {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinnedBuffer:
    """``size_bytes`` of host memory as a flat byte tensor.

    Args:
        size_bytes: may be 0.
        pin: register it with CUDA, so that copies run beside computation.
        device_index: the GPU whose NUMA node the memory goes to.
        available_bytes: what is free now; asked between chunks, so that the kernel never has to kill the process.
        cudart: CUDA's runtime, for tests.

    Attributes:
        tensor: uint8 [size_bytes], valid until :meth:`close`.

    Raises:
        HostMemoryError: not enough memory, or CUDA refuses to register it. Nothing stays allocated.
    """

    def __init__(
        self,
        size_bytes: int,
        pin: bool,
        device_index: Optional[int] = None,
        available_bytes: Callable[[], int] = host_memory.available_bytes,
        cudart: Any = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.size_bytes = size_bytes
        self._address: Optional[int] = None
        self._registered = False
        self._cudart = cudart
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if size_bytes == 0:
            return
        self._mapped_bytes = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._address = _map(self._mapped_bytes)
        try:
            _bind(self._address, self._mapped_bytes, _numa_node(device_index) if pin else None)
            self._touch(available_bytes, patience_s)
            if pin:
                self._register()
            memory = (ctypes.c_uint8 * size_bytes).from_address(self._address)
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregisters and unmaps. The tensor must not be used any more. Calling it twice does nothing."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._registered:
            self._cudart.cudaHostUnregister(self._address)
            self._registered = False
        if self._address is not None:
            _libc.munmap(self._address, self._mapped_bytes)
            self._address = None

    def _touch(self, available_bytes: Callable[[], int], patience_s: float) -> None:
        threads = min(16, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, self._mapped_bytes, _CHUNK_BYTES):
                stop = min(start + _CHUNK_BYTES, self._mapped_bytes)
                self._wait_for_memory(start, stop - start, available_bytes, patience_s)
                share = -(-(stop - start) // threads // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES or _HUGE_PAGE_BYTES
                pieces = [(self._address + begin, min(share, stop - begin)) for begin in range(start, stop, share)]
                list(pool.map(lambda piece: _populate(*piece), pieces))

    def _wait_for_memory(self, taken_bytes: int, next_bytes: int, available_bytes: Callable[[], int], patience_s: float) -> None:
        """Memory of a virtual machine may grow while it is used: no sign of that for a while means there is no more."""
        deadline, best = time.monotonic() + patience_s, available_bytes()
        while (now := available_bytes()) < next_bytes + min(_RESERVE_BYTES, next_bytes):
            if now > best:
                deadline, best = time.monotonic() + patience_s, now
            if time.monotonic() > deadline:
                raise HostMemoryError(
                    f"host memory ran out: {self.size_bytes / GIB:.3f} GiB are needed for swapped activations, {taken_bytes / GIB:.3f} GiB were taken, "
                    f"{now / GIB:.3f} GiB are free now and did not grow for {patience_s:g} s. Lower --memo-alpha, keep more layers on the GPU "
                    "(--memo-keep-layers), or use a machine with more host memory."
                )
            time.sleep(0.05)

    def _register(self) -> None:
        """In one call: CUDA refuses a copy that touches two registered ranges (cudaErrorInvalidValue), so parts side by side will not do."""
        if self._cudart is None:
            self._cudart = torch.cuda.cudart()
        code = int(self._cudart.cudaHostRegister(self._address, self._mapped_bytes, 0))
        if code != 0:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            allowed = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.3f} GiB"
            raise HostMemoryError(
                f"CUDA could not pin {self.size_bytes / GIB:.3f} GiB of host memory (cudaHostRegister: error {code}; locked memory allowed by "
                f"ulimit -l: {allowed}). Raise the limit or lower --memo-alpha."
            )
        self._registered = True


def _map(size_bytes: int) -> int:
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise HostMemoryError(
            f"{size_bytes / GIB:.3f} GiB of host address space cannot be mapped: {os.strerror(ctypes.get_errno())}. Look at ulimit -v and lower --memo-alpha."
        )
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
    # Loader workers and asynchronous checkpoints fork; a child must neither share nor copy this.
    _libc.madvise(address, size_bytes, _MADV_DONTFORK)
    return address


def _populate(address: int, size_bytes: int) -> None:
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) != 0:  # an older kernel
        ctypes.memset(address, 0, size_bytes)


def _numa_node(device_index: Optional[int]) -> Optional[int]:
    """The NUMA node of a GPU, or None where there is only one or it is not known."""
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device_index is None else device_index)
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    except (OSError, ValueError, AttributeError):
        return None
    return node if node >= 0 else None


def _bind(address: int, size_bytes: int, node: Optional[int]) -> None:
    number = _SYS_MBIND.get(os.uname().machine)
    if node is None or number is None:
        return
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    _libc.syscall(number, ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MPOL_PREFERRED, mask, ctypes.c_ulong(1024), 0)
