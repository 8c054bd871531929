"""One tensor-parallel rank of a layer stack, stock Megatron's modes and MEMO's side by side in one process.

    python benchmarks/layer_stack.py --tokens 524288 --layers 4 --attention fa4 --modes keep-all,memo:1:1:1 --repeats 5 --out results.json

The rank is a loopback rank (megatron_memo.testing.loopback): true shapes and true memory, no communication and no time for it.
Every mode runs ``--warmup`` steps from an empty cache, which give its memory; then the modes take turns, ``--repeats`` times, which gives its
times. Live bytes are the allocator's peak above the weights, the main gradients and the harness's own tensors.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # what Megatron asks for with tensor parallelism

import argparse
import gc
import time
import traceback
from dataclasses import asdict
from statistics import median
from typing import Any, Dict, List, Optional

import torch

import ceiling
import profiling
from harness import (
    GIB, Shape, Stack, allocated_bytes, build_block, checked_tflops, choose_device, memory_stats, on_gpu, peak_tflops, reset_peaks,
    start_parallel, step_flops, synchronize, versions, worst_difference, write_json,
)
from modes import Mode, Running, parse_mode, running


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=524288, help="length of the sequence, all ranks together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--modes", default="keep-all,memo:1:1:1", help="comma-separated; the first one is the reference")
    parser.add_argument("--attention", choices=("te", "fa4"), default="te", help="of modes without @te or @fa4, and of the ceiling")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps of each mode before the turns, at least 1")
    parser.add_argument("--no-ceiling", action="store_true", help="do not measure attention and GEMM rates before and after")
    parser.add_argument("--profile", default="", metavar="MODES", help="comma-separated modes of which to profile one step")
    parser.add_argument("--stalls", action="store_true", help="print where compute waited for copies, layer by layer")
    parser.add_argument("--out", default=None, metavar="FILE", help="results, written after every turn")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--query-groups", type=int, default=None)
    parser.add_argument("--ffn", type=int, default=16384)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--norm", choices=("RMSNorm", "LayerNorm"), default="RMSNorm")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="try the script out with no GPU, on small sizes")
    return parser.parse_args(argv)


class Bench:
    """The results so far, and how to add to them."""

    def __init__(self, args: argparse.Namespace) -> None:
        groups = args.query_groups or args.heads
        self.args = args
        self.modes = [parse_mode(text, args.attention) for text in args.modes.split(",")]
        self.profiled = [parse_mode(text, args.attention) for text in args.profile.split(",") if text]
        self.shape = Shape(
            args.tokens, args.layers, args.hidden, args.heads, groups, args.ffn, args.swiglu, args.micro_batch, args.tp, args.norm
        )
        self.stack = Stack(self.shape, build_block(self.shape))
        self.reference: Dict[str, torch.Tensor] = {}
        self.ceilings: List[Dict[str, Any]] = []
        self.base_bytes = 0
        self.result: Dict[str, Any] = {
            "benchmark": "layer_stack",
            "rank": f"loopback rank of {args.tp}: true shapes and memory, no communication",
            "shape": asdict(self.shape),
            "peak_tflops": peak_tflops(),
            "versions": versions(),
            "harness_bytes": self.stack.harness_bytes,
            "static_bytes": self.stack.static_bytes,
            "modes": {mode.text: {"steps": []} for mode in self.modes},
        }

    def save(self) -> None:
        write_json(self.args.out, self.result)

    def settle_statics(self) -> None:
        """Makes what appears once (workspaces, compiled kernels, dummy gradients) appear now, on a short sequence; then takes the base line."""
        small = Shape(**{**asdict(self.shape), "tokens": min(self.shape.tokens, 512 * self.shape.tp)})
        for attention in sorted({mode.attention for mode in self.modes}):
            try:
                with running(Stack(small, self.stack.block), parse_mode("keep-all", attention)) as now:
                    now.step()
            except Exception as error:  # an attention that is not there takes its own modes with it, not the others
                traceback.print_exc(limit=-3)
                for mode in self.modes:
                    if mode.attention == attention:
                        self.result["modes"][mode.text]["error"] = f"{type(error).__name__}: {error}"[:600]
        self.stack.clear()
        gc.collect()
        synchronize()
        self.base_bytes = allocated_bytes()
        self.result["base_bytes"] = self.base_bytes

    def measure_ceiling(self, repeats: int) -> None:
        if self.args.no_ceiling:
            return
        attention = "sdpa" if self.args.cpu else self.args.attention
        reset_peaks(empty_cache=True)
        self.ceilings.append(ceiling.measure(self.shape, attention, repeats, gemm_rows=65536))
        self.result["ceiling"] = ceiling.combine(self.shape, self.ceilings)
        reset_peaks(empty_cache=True)
        self.save()

    def one_step(self, now: Running) -> Dict[str, Any]:
        """One timed step and what the allocator did in it."""
        self.stack.clear()  # the last step's gradient of x is no part of this step's memory
        gc.collect()
        synchronize()
        reset_peaks()
        before = memory_stats()
        start = time.perf_counter()
        now.step()
        synchronize()
        seconds = time.perf_counter() - start
        after = memory_stats()
        step = {
            "seconds": seconds,
            "tflops": checked_tflops(now.mode.text, step_flops(self.shape), seconds),
            "live_peak_bytes": after["live_peak_bytes"] - self.base_bytes,
            "reserved_peak_bytes": after["reserved_peak_bytes"],
            "new_segments": after["segments_made"] - before["segments_made"],
            "retries": after["retries"] - before["retries"],
        }
        if now.session is not None:
            step["memo"] = now.session.report()
        return step

    def turn(self, mode: Mode, warming: bool) -> None:
        """Puts the stack into ``mode`` and runs the steps of one turn. A mode that fails once is left out of later turns."""
        entry = self.result["modes"][mode.text]
        if "error" in entry:
            return
        try:
            reset_peaks(empty_cache=warming)
            start = time.perf_counter()
            with running(self.stack, mode) as now:
                synchronize()
                entry["enter_s"] = time.perf_counter() - start
                entry["enter_live_peak_bytes"] = memory_stats()["live_peak_bytes"] - self.base_bytes
                for _ in range(max(1, self.args.warmup) if warming else 1):
                    if warming:
                        self.stack.zero_main_grads()
                    entry["steps"].append({"warmup": warming, **self.one_step(now)})
                if warming:
                    self._compare(entry)
        except Exception as error:  # reported, and the other modes go on
            traceback.print_exc(limit=-6)
            entry["error"] = f"{type(error).__name__}: {error}"[:600]
        self.stack.clear()
        gc.collect()
        summarize(entry, self.result, self.shape)
        self.save()
        print(line(mode, entry), flush=True)

    def _compare(self, entry: Dict[str, Any]) -> None:
        """Gradients against the first mode's: a mode that skips part of the work shows here, whatever its norms."""
        found = self.stack.gradients()
        if not self.reference:
            self.reference = {name: gradient.detach().to("cpu", copy=True) for name, gradient in found.items()}
        entry["gradient_difference"], entry["gradient_difference_of"] = worst_difference(found, self.reference)

    def profile(self) -> None:
        for mode in self.profiled:
            try:
                with running(self.stack, mode) as now:
                    table = profiling.profile_step(now.step)
                self.result.setdefault("profiles", {})[mode.text] = table
                print(f"\nkernels of one step, {mode.text}\n{profiling.as_text(table)}", flush=True)
            except Exception as error:  # a profile is no reason to lose the figures
                traceback.print_exc(limit=-6)
                self.result.setdefault("profiles", {})[mode.text] = {"error": str(error)[:600]}
            self.stack.clear()
            self.save()


def summarize(entry: Dict[str, Any], result: Dict[str, Any], shape: Shape) -> None:
    """Fills in the figures of a mode from its steps: times from its turns, memory from the warm-up out of an empty cache."""
    timed = [step for step in entry["steps"] if not step["warmup"]]
    warm = [step for step in entry["steps"] if step["warmup"]]
    if warm:
        entry["live_peak_gib"] = max(step["live_peak_bytes"] for step in entry["steps"]) / GIB
        entry["reserved_peak_gib"] = max(step["reserved_peak_bytes"] for step in warm) / GIB
        entry["warmup_new_segments"] = [step["new_segments"] for step in warm]
    memo = next((step["memo"] for step in reversed(entry["steps"]) if "memo" in step), None)
    if memo is not None:
        entry["host_peak_gib"] = memo["host_peak_bytes"] / GIB
        entry["stall_ms"] = memo["stall_ms"]
        layers = [layer.get("swapped_bytes", 0) for layer in memo.get("layers", []) if isinstance(layer, dict)]
        entry["host_gib_per_layer"] = max(layers, default=memo["host_peak_bytes"]) / GIB
    if not timed:
        return
    seconds = [step["seconds"] for step in timed]
    middle = median(seconds)
    entry.update(median_s=middle, min_s=min(seconds), max_s=max(seconds), spread_percent=100 * (max(seconds) - min(seconds)) / middle)
    entry["new_segments"] = [step["new_segments"] for step in timed]
    entry["tflops"] = checked_tflops("median", step_flops(shape), middle)
    if result["peak_tflops"]:
        entry["mfu_percent"] = 100 * entry["tflops"] / result["peak_tflops"]
    if "ceiling" in result:
        entry["ceiling_percent"] = 100 * result["ceiling"]["step_s"] / middle


def line(mode: Mode, entry: Dict[str, Any]) -> str:
    if "error" in entry:
        return f"{mode.text:28} {entry['error']}"
    last = entry["steps"][-1]
    parts = [f"{mode.text:28} {last['seconds']:9.4f} s{' warm-up' if last['warmup'] else ''}"]
    parts.append(f"live {entry['live_peak_gib']:.2f} GiB, reserved {entry['reserved_peak_gib']:.2f} GiB, new segments {last['new_segments']}")
    parts.append(f"entered in {entry['enter_s']:.1f} s, gradients differ {entry['gradient_difference']:.1e} ({entry['gradient_difference_of']})")
    for key, unit in (("median_s", "s median"), ("mfu_percent", "% MFU"), ("ceiling_percent", "% of ceiling"), ("host_peak_gib", "GiB host"),
                      ("stall_ms", "ms stalled")):
        if isinstance(entry.get(key), (int, float)):
            parts.append(f"{entry[key]:.4g} {unit}")
    return ", ".join(parts)


def main(argv: Optional[List[str]] = None) -> Dict[str, Any]:
    args = arguments(argv)
    choose_device(args.cpu)
    from megatron_memo.testing import loopback

    loopback.init(args.tp)
    if on_gpu():
        torch.cuda.set_device(0)
    start_parallel(args.tp)
    bench = Bench(args)
    bench.settle_statics()
    bench.measure_ceiling(repeats=2)
    for mode in bench.modes:
        bench.turn(mode, warming=True)
    for _ in range(args.repeats):
        for mode in bench.modes:
            bench.turn(mode, warming=False)
    bench.measure_ceiling(repeats=1)
    for mode in bench.modes:
        summarize(bench.result["modes"][mode.text], bench.result, bench.shape)
    bench.save()
    from table import layer_stack_table

    print("\n" + layer_stack_table([bench.result]), flush=True)
    if args.stalls:
        print(profiling.stalls_as_text(bench.result), flush=True)
    bench.profile()
    return bench.result


if __name__ == "__main__":
    main()
