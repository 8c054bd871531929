"""Host memory near a GPU: on a host of several NUMA nodes, copies to another node's memory run at a fraction of the rate."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Optional

_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MASK_WORDS = 16
_WORD_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)


def pci_address(properties: Any) -> Optional[str]:
    """The name under /sys/bus/pci/devices of a GPU with these ``torch.cuda`` device properties; None where torch does not tell."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None


def node_of(pci: Optional[str], root: str = "/") -> Optional[int]:
    """The NUMA node of a PCI device, or None where there is only one node or it is not known (-1 in virtual machines)."""
    nodes = list((Path(root) / "sys/devices/system/node").glob("node[0-9]*"))
    if pci is None or len(nodes) < 2:
        return None
    try:
        node = int((Path(root) / "sys/bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_WORDS * _WORD_BITS else None


def prefer(address: int, size_bytes: int, node: Optional[int]) -> bool:
    """Pages of [address, address + size_bytes) come from ``node`` while it has any, else from another node. True when the kernel agreed.

    Preferred, not bound: a strict binding would let the kernel kill the process while other nodes have memory.
    """
    number = _SYS_MBIND.get(os.uname().machine)
    if node is None or number is None:
        return False
    mask = (ctypes.c_uint64 * _MASK_WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel reads one bit less than it is told.
    bits = ctypes.c_ulong(_MASK_WORDS * _WORD_BITS + 1)
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_long(_MPOL_PREFERRED), mask, bits, ctypes.c_long(0)
    return _libc.syscall(ctypes.c_long(number), *arguments) == 0
