"""Where the time of one step goes: kernels by name and by group, idle time of the device, waits for copies."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, Tuple

import torch

# First match wins; patterns are searched in the lower-case kernel name.
GROUPS = (
    ("copy to host", r"memcpy dtoh"),
    ("copy from host", r"memcpy htod"),
    ("copy on device", r"memcpy dtod|memset|catarray|direct_copy"),
    ("attention backward", r"(flash|fmha|sdpa|attn|attention).*(bwd|backward|bprop|dgrad)|(bwd|backward|bprop).*(flash|fmha|sdpa|attn|attention)"),
    ("attention forward", r"flash|fmha|sdpa|attn|attention"),
    ("rope", r"rope|rotary"),
    ("norm", r"norm|rms"),
    ("linears", r"gemm|nvjet|cutlass|xmma|cublas|splitk|wgmma"),
    ("activation", r"gelu|silu|swiglu|act_and"),
)


def group_of(kernel: str) -> str:
    """The group of a device activity, by its name."""
    name = kernel.lower()
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "elementwise and other")


def covered(intervals: Iterable[Tuple[float, float]]) -> float:
    """Length of the union of half-open intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def summary(events: List[Tuple[str, float, float]]) -> Dict[str, Any]:
    """Of device activities (name, start us, end us): time by kernel and by group, and what no kernel covers.

    ``idle_ms`` is the part of the span between the first and the last kernel in which no kernel ran; copies beside kernels do not count.
    """
    kernels: Dict[str, List[float]] = {}
    groups: Dict[str, float] = {}
    for name, start, stop in events:
        entry = kernels.setdefault(name, [0.0, 0])
        entry[0] += (stop - start) / 1e3
        entry[1] += 1
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + (stop - start) / 1e3
    computing = [(start, stop) for name, start, stop in events if not group_of(name) in ("copy to host", "copy from host")]
    span = (max(stop for _, stop in computing) - min(start for start, _ in computing)) / 1e3 if computing else 0.0
    busy = covered(computing) / 1e3
    by_time = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "span_ms": span,
        "busy_ms": busy,
        "idle_ms": span - busy,
        "groups_ms": dict(sorted(groups.items(), key=lambda item: -item[1])),
        "kernels": [{"name": name[:120], "group": group_of(name), "ms": ms, "count": count} for name, (ms, count) in by_time[:40]],
    }


def profile_step(step: Callable[[], None]) -> Dict[str, Any]:
    """Runs ``step`` under torch.profiler, device activities only."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return summary(events)


def as_text(table: Dict[str, Any], kernels: int = 14) -> str:
    lines = [f"span {table['span_ms']:.1f} ms, some kernel running {table['busy_ms']:.1f} ms, none {table['idle_ms']:.1f} ms"]
    lines += [f"{ms:10.1f} ms  {group}" for group, ms in table["groups_ms"].items()]
    lines += [f"{k['ms']:10.1f} ms  {k['count']:5d} x  [{k['group']}] {k['name'][:84]}" for k in table["kernels"][:kernels]]
    return "\n".join(lines)


def stalls_as_text(result: Dict[str, Any]) -> str:
    """Time that compute waited for copies, of each timed step of each mode that copies; with the layers' bytes, as memo reports them."""
    lines = []
    for name, entry in result["modes"].items():
        for number, step in enumerate(entry["steps"]):
            if "memo" in step and not step["warmup"]:
                memo = step["memo"]
                lines.append(
                    f"{name} step {number}: stalled {memo['stall_ms']} ms, swapped {memo['swapped_bytes']} bytes, "
                    f"recomputed {memo['recomputed_bytes']} bytes"
                )
                if number == len(entry["steps"]) - 1:
                    lines += [f"    layer {index}: {layer}" for index, layer in enumerate(memo.get("layers", []))]
    return "\n".join(["stalls"] + lines)
