"""The planner on many traces: peak against the live-load bound, time, and what PyTorch's caching allocator would reserve (simulated).

    python benchmarks/planner.py --out results/planner.json                                      # made-up transformer steps
    python benchmarks/planner.py --traces recorded/*.csv --out results/recorded.json             # any traces, recorded ones say
    python benchmarks/planner.py --challenging DIR --out results/planner_challenging.json        # minimalloc's, capacity in the name (A.1048576.csv)

Needs no GPU, torch or Megatron. Exit status 1 when a goal is missed: peak / bound at most 1.002 in at most 5 s for a trace, the capacity in at most
60 s for a challenging one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from megatron_memo.plan.caching import MIB, CachingSettings, simulate
from megatron_memo.plan.csv_format import read_trace
from megatron_memo.plan.exact import cores
from megatron_memo.plan.planner import make_plan
from megatron_memo.plan.records import Buffer, Settings
from transformer_traces import KEEP, RECOMPUTE, SWAP, GptShape, pipeline_step, whole_step

MOST_RATIO = 1.002
MOST_SECONDS = 5.0
NATIVE = (CachingSettings(), CachingSettings(expandable=True), CachingSettings(max_split_bytes=512 * MIB))


def made_up() -> Iterator[Tuple[str, List[Buffer]]]:
    """Policies, depths and schedules; "odd sizes": no two tensors of a layer have a common divisor."""
    for odd in (0.0, 0.5):
        name = ", odd sizes" if odd else ""
        for policy in (KEEP, SWAP, RECOMPUTE):
            yield f"{policy}, 32 layers{name}", whole_step(GptShape(32, jitter=odd), policy)
            yield f"{policy}, 96 layers{name}", whole_step(GptShape(96, jitter=odd), policy)
            stage = GptShape(8, tokens=32_768, jitter=odd)
            yield f"{policy}, 1F1B, stage 0 of 4, 8 micro-batches{name}", pipeline_step(stage, policy, 4, 0, 8)
            chunk = GptShape(4, tokens=32_768, jitter=odd)
            yield f"{policy}, interleaved, stage 0 of 4, 2 chunks, 8 micro-batches{name}", pipeline_step(chunk, policy, 4, 0, 8, chunks=2)
        yield f"keep, 264 layers{name}", whole_step(GptShape(264, jitter=odd), KEEP)


def measure(name: str, buffers: List[Buffer], settings: Settings, repeats: int) -> Dict[str, Any]:
    """A row of the results. The slowest of the repeats counts; every one must give the same plan."""
    plans = [make_plan(buffers, settings) for _ in range(repeats)]
    plan = plans[0]
    row: Dict[str, Any] = {
        "trace": name,
        "buffers": len(buffers),
        "bound_bytes": plan.bound_bytes,
        "peak_bytes": plan.peak_bytes,
        "ratio": plan.ratio,
        "proved": plan.proved,
        "seconds": max(one.seconds for one in plans),
        "method": plan.method,
        "layer_kinds": plan.layer_kinds,
        "same_plan_every_time": all(one.offsets_bytes == plan.offsets_bytes for one in plans),
    }
    if settings.capacity_bytes is not None:
        row["capacity_bytes"] = settings.capacity_bytes
        row["within_goal"] = plan.peak_bytes <= settings.capacity_bytes
    else:
        row["within_goal"] = plan.ratio <= MOST_RATIO and row["seconds"] <= MOST_SECONDS
        row["native_reserved_over_bound"] = {one.name: simulate(buffers, one).reserved_bytes / plan.bound_bytes for one in NATIVE}
    return row


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--traces", nargs="+", default=None, metavar="TRACE.csv", help="these instead of the made-up ones")
    which.add_argument("--challenging", nargs="+", default=None, metavar="DIR", help="folders of NAME.CAPACITY.csv")
    parser.add_argument("--only", default="", metavar="TEXT", help="traces whose name has this in it")
    parser.add_argument("--seconds", type=float, default=None, help="for each trace (default 4.5, challenging 55)")
    parser.add_argument("--min-bytes", type=int, default=2**20, help="smaller requests of made-up steps are left out, as --memo leaves them to the native allocator")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None, help="threads (default: all cores)")
    parser.add_argument("--out", default=None, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None) -> Dict[str, Any]:
    args = arguments(argv)
    seconds = args.seconds or (55.0 if args.challenging else 4.5)
    if args.challenging:
        files = sorted(file for folder in args.challenging for file in Path(folder).glob("*.*.csv"))
        traces = [(file.name.split(".")[0], read_trace(file), int(file.name.split(".")[1])) for file in files]
    elif args.traces:
        traces = [(Path(file).stem, read_trace(file), None) for file in args.traces]
    else:
        traces = [(name, buffers, None) for name, buffers in made_up()]
        traces = [(name, [buffer for buffer in buffers if buffer.size_bytes >= args.min_bytes], None) for name, buffers, _ in traces]
    result: Dict[str, Any] = {
        "benchmark": "planner",
        "traces": "minimalloc's challenging instances" if args.challenging else "files" if args.traces else "made up (transformer_traces.py)",
        "seconds_limit": seconds,
        "min_bytes": None if args.challenging or args.traces else args.min_bytes,
        "workers": args.workers or cores(),
        "repeats": args.repeats,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "ortools")},
            "cpu": processor(),
            "cores": os.cpu_count(),
        },
        "rows": [],
    }
    for name, buffers, capacity in traces:
        if args.only not in name:
            continue
        row = measure(name, buffers, Settings(seconds=seconds, capacity_bytes=capacity, workers=args.workers), args.repeats)
        result["rows"].append(row)
        native = " ".join(f"{value:.3f}" for value in row.get("native_reserved_over_bound", {}).values())
        goal = "" if row["within_goal"] else "  GOAL MISSED"
        print(f"{name}: {row['buffers']} buffers, ratio {row['ratio']:.5f}, {row['seconds']:.2f} s, native {native or '-'}, {row['method']}{goal}", flush=True)
        write(args.out, result)
    result["ok"] = bool(result["rows"]) and all(row["within_goal"] for row in result["rows"])
    write(args.out, result)
    return result


def processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(path: Optional[str], result: Dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(0 if main()["ok"] else 1)
