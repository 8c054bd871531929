"""How long host memory takes to be there, and how fast copies to it are: one slab of MEMO against torch's pinned allocator.

    python benchmarks/pinning.py --gib 32 --out pinning.json

Each way takes the same size, one after the other, in one process. MEMO's slab is taken twice: memory of a virtual machine can grow when it
is first used, and then the first one to use it pays. "parts" registers the slab with CUDA in several calls side by side instead of one, to
show what that costs and saves: a copy that touches two parts. Torch comes last, when the memory is there.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Optional

import torch

from harness import GIB, versions, write_json
from megatron_memo.errors import MemoError
from megatron_memo.swap import host_memory
from megatron_memo.swap.pinned import PinnedBuffer

DEVICE = "cuda"
HUGE_PAGE_BYTES = 2 << 20
REPEATS = 4


def total_gib() -> float:
    return round(host_memory.read_limits().total_bytes / GIB, 2)


def huge_gib() -> Optional[float]:
    """Memory of this process in huge pages; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((round(int(line.split()[1]) / 2**20, 3) for line in lines if line.startswith("AnonHugePages:")), None)


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rate_gib_s(destination: torch.Tensor, source: torch.Tensor) -> float:
    """Median rate of copies on the device's clock, after a warm-up."""
    times_s = []
    for _ in range(REPEATS + 1):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        destination.copy_(source, non_blocking=True)
        after.record()
        after.synchronize()
        times_s.append(before.elapsed_time(after) / 1e3)
    return source.numel() / GIB / median(times_s[1:])


def one_copy(destination: torch.Tensor, source: torch.Tensor) -> Dict[str, Any]:
    """Does the call return before the copy is over? An error of CUDA is a finding too."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    try:
        destination.copy_(source, non_blocking=True)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    returned_s = time.perf_counter() - start
    event = torch.cuda.Event()
    event.record()
    pending = not event.query()
    event.synchronize()
    over_s = time.perf_counter() - start
    return {"returned_ms": returned_s * 1e3, "over_ms": over_s * 1e3, "asynchronous": pending and returned_s < over_s / 2}


def there_and_back(memory: torch.Tensor, device_bytes: torch.Tensor) -> Dict[str, Any]:
    """Both directions of a copy, and whether the bytes that come back are those that went."""
    memory.zero_()
    back = torch.zeros_like(device_bytes)
    found = {"pinned": memory.is_pinned(), "d2h": one_copy(memory, device_bytes), "h2d": one_copy(back, memory)}
    torch.cuda.synchronize()
    found["equal"] = bool(torch.equal(back, device_bytes))
    return found


def rates(memory: torch.Tensor, device_bytes: torch.Tensor) -> Dict[str, float]:
    """Copies into the first and the last bytes of the memory."""
    size = device_bytes.numel()
    places = {"first": memory[:size], "last": memory[-size:]}
    found = {}
    for name, place in places.items():
        found[f"d2h_{name}_gib_s"] = rate_gib_s(place, device_bytes)
        found[f"h2d_{name}_gib_s"] = rate_gib_s(device_bytes, place)
    return found


def part_bytes(size_bytes: int, parts: int) -> int:
    """Bytes of a part: whole huge pages; the last part may be shorter."""
    return -(-size_bytes // parts // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def across(memory: torch.Tensor, part: int, device_bytes: torch.Tensor) -> List[Dict[str, Any]]:
    """A copy across each boundary between two parts, as much of it before as behind."""
    half = device_bytes.numel() // 2
    starts = (boundary - half for boundary in range(part, memory.numel(), part))
    return [there_and_back(memory[s : s + 2 * half], device_bytes[: 2 * half]) for s in starts if s >= 0 and s + 2 * half <= memory.numel()]


def slab(size_bytes: int, args: argparse.Namespace, device_bytes: Optional[torch.Tensor]) -> Dict[str, Any]:
    """MEMO's buffer: pinned in one call."""
    before = total_gib()
    buffer = PinnedBuffer(size_bytes, pin=device_bytes is not None, threads=args.threads)
    found: Dict[str, Any] = {f"{name}_s": seconds for name, seconds in buffer.phase_s.items()}
    found["total_s"] = sum(buffer.phase_s.values())
    found.update(numa_node=buffer.numa_node, huge_gib=huge_gib(), machine_gib_before=before, machine_gib_after=total_gib())
    if device_bytes is not None:
        found.update(rates(buffer.tensor, device_bytes), across=across(buffer.tensor, part_bytes(size_bytes, args.parts), device_bytes))
    found["close_s"] = seconds_of(buffer.close)
    return found


def in_parts(size_bytes: int, args: argparse.Namespace, device_bytes: torch.Tensor) -> Dict[str, Any]:
    """The same memory registered in several calls side by side: how long that takes, and what becomes of a copy across two parts."""
    cudart, part = torch.cuda.cudart(), part_bytes(size_bytes, args.parts)
    with PinnedBuffer(size_bytes, pin=False, threads=args.threads) as buffer:
        address = buffer.tensor.data_ptr()
        starts = list(range(0, size_bytes, part))
        with ThreadPoolExecutor(len(starts)) as pool:
            began = time.perf_counter()
            codes = list(pool.map(lambda s: int(cudart.cudaHostRegister(address + s, min(part, size_bytes - s), 0)), starts))
            found: Dict[str, Any] = {"parts": len(starts), "register_s": time.perf_counter() - began, "codes": codes}
        try:
            if not any(codes):
                found.update(rates(buffer.tensor, device_bytes), across=across(buffer.tensor, part, device_bytes))
        finally:
            torch.cuda.synchronize()
            for start, code in zip(starts, codes):
                if code == 0:
                    cudart.cudaHostUnregister(address + start)
    return found


def of_torch(size_bytes: int, device_bytes: torch.Tensor) -> Dict[str, Any]:
    """torch.empty(pin_memory=True), which rounds up to a power of two."""
    taken_bytes = 1 << (size_bytes - 1).bit_length()
    free_bytes = host_memory.free_bytes()
    if taken_bytes + GIB > free_bytes:
        return {"skipped": f"takes {taken_bytes / GIB:.1f} GiB for {size_bytes / GIB:.1f} GiB, {free_bytes / GIB:.1f} GiB are free"}
    began = time.perf_counter()
    memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return {"total_s": time.perf_counter() - began, "expected_taken_gib": taken_bytes / GIB, **rates(memory, device_bytes)}


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=32.0, help="size of the host memory")
    parser.add_argument("--copy-gib", type=float, default=1.0, help="size of one copy")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=None, help="threads that touch the memory; default: as in training")
    parser.add_argument("--skip", action="append", choices=("again", "parts", "torch"), default=[], help="leave this turn out (may be repeated)")
    parser.add_argument("--cpu", action="store_true", help="no GPU: only take and touch the memory")
    parser.add_argument("--out", default=None, metavar="FILE")
    args = parser.parse_args(argv)
    if not (args.parts >= 2 and 0 < args.copy_gib <= args.gib / args.parts):
        parser.error(f"expected two parts or more, none smaller than a copy: found {args.parts} parts of {args.gib:g} GiB, copies of {args.copy_gib:g} GiB")
    return args


def summary(name: str, entry: Dict[str, Any]) -> str:
    figures = [f"{key} {value:.4g}" for key, value in entry.items() if isinstance(value, float)]
    figures += [f"{key} {value}" for key, value in entry.items() if key in ("error", "skipped", "numa_node")]
    copies = [copy for place in entry.get("across", ()) for copy in (place["d2h"], place["h2d"])]
    if copies:
        right = sum(place["equal"] for place in entry["across"])
        late, errors = sum(copy.get("asynchronous", False) for copy in copies), [copy["error"] for copy in copies if "error" in copy]
        figures.append(f"across boundaries: {late} of {len(copies)} copies asynchronous, {right} of {len(entry['across'])} places right")
        figures += [f"{len(errors)} refused ({errors[0]})"] if errors else []
    return f"{name}: " + ", ".join(figures)


def main(argv: Optional[List[str]] = None) -> Dict[str, Any]:
    args = arguments(argv)
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --cpu takes and touches the memory only")
    size_bytes = int(args.gib * GIB)
    device_bytes = None if args.cpu else torch.randint(0, 256, (int(args.copy_gib * GIB),), dtype=torch.uint8, device=DEVICE)
    turns: Dict[str, Callable[[], Dict[str, Any]]] = {"slab": lambda: slab(size_bytes, args, device_bytes)}
    turns["again"] = turns["slab"]
    if device_bytes is not None:
        turns["parts"] = lambda: in_parts(size_bytes, args, device_bytes)
        turns["torch"] = lambda: of_torch(size_bytes, device_bytes)
    result: Dict[str, Any] = {"benchmark": "pinning", "gib": args.gib, "copy_gib": args.copy_gib, "versions": versions(), "turns": {}}
    for name, turn in turns.items():
        if name in args.skip:
            continue
        try:
            entry = turn()
        except (MemoError, RuntimeError) as error:
            entry = {"error": f"{type(error).__name__}: {error}"}
        result["turns"][name] = entry
        print(summary(name, entry), flush=True)
        write_json(args.out, result)
    places = [place for name in ("slab", "again") for place in result["turns"].get(name, {}).get("across", ())]
    asynchronous = all(copy.get("asynchronous", False) for place in places for copy in (place["d2h"], place["h2d"]))
    seen = bool(places) or device_bytes is None
    result["ok"] = "error" not in result["turns"]["slab"] and seen and asynchronous and all(place["equal"] and place["pinned"] for place in places)
    write_json(args.out, result)
    print("ok" if result["ok"] else "NOT OK: a slab could not be taken, or a copy across a boundary was wrong, unpinned or synchronous")
    return result


if __name__ == "__main__":
    raise SystemExit(0 if main()["ok"] else 1)
