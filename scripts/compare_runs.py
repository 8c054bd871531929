#!/usr/bin/env python
"""Sets a stock and a MEMO run side by side, from Megatron's logs, MEMO's report and the meter of live bytes.

    python scripts/compare_runs.py --stock-log A --memo-log B --report DIR/report.rank0.json --stock-bytes A.json --memo-bytes B.json

Exit status 1: the losses differ by more than --tolerance, or the logs cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

_STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_TIME = re.compile(r"elapsed time per iteration \(ms\): (\S+)")
_LOSS = re.compile(r"\| lm loss: (\S+)")
_EVALUATION = re.compile(r"validation loss at (?:iteration \d+ on )?(.+?) \| lm loss value: (\S+)")


class CompareError(Exception):
    """Runs that cannot be compared."""


class Step(NamedTuple):
    """One line of Megatron's log."""

    iteration: int
    loss: float
    time_ms: float


class Run(NamedTuple):
    """What a log says: logged steps, and losses of evaluations by name."""

    steps: List[Step]
    evaluations: Dict[str, float]


def read_log(path: Path) -> Run:
    """Reads Megatron's log lines. Raises CompareError when there is no step with a loss in it."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise CompareError(f"{path}: cannot be read: {error.strerror}.") from error
    steps, evaluations = [], {}
    for line in lines:
        step, time, loss, evaluation = _STEP.search(line), _TIME.search(line), _LOSS.search(line), _EVALUATION.search(line)
        if step and time and loss:
            steps.append(Step(int(step[1]), float(loss[1]), float(time[1])))
        elif evaluation:
            evaluations[evaluation[1].strip()] = float(evaluation[2])
    if not steps:
        raise CompareError(f"{path}: expected lines with 'iteration' and 'lm loss', found none in {len(lines)} lines. Did that run fail?")
    return Run(steps, evaluations)


def relative_difference(first: float, second: float) -> float:
    """|first - second| over the larger one; infinite where either is not a finite number, so that it never passes for a small one."""
    if not (abs(first) < float("inf") and abs(second) < float("inf")):
        return float("inf")
    scale = max(abs(first), abs(second))
    return abs(first - second) / scale if scale else 0.0


def largest_difference(stock: Run, memo: Run) -> float:
    """Of the losses of all logged steps and evaluations. Raises CompareError when the runs did not log the same ones."""
    if [s.iteration for s in stock.steps] != [s.iteration for s in memo.steps] or stock.evaluations.keys() != memo.evaluations.keys():
        raise CompareError(
            f"the runs logged different steps: stock {len(stock.steps)} up to {stock.steps[-1].iteration} and {len(stock.evaluations)} evaluations, "
            f"memo {len(memo.steps)} up to {memo.steps[-1].iteration} and {len(memo.evaluations)}."
        )
    differences = [relative_difference(a.loss, b.loss) for a, b in zip(stock.steps, memo.steps)]
    differences += [relative_difference(loss, memo.evaluations[name]) for name, loss in stock.evaluations.items()]
    return max(differences)


def median_time_ms(run: Run, skip: int) -> Optional[float]:
    """Median of the logged step times after the first ``skip`` steps."""
    times = [step.time_ms for step in run.steps if step.iteration > skip]
    return statistics.median(times) if times else None


def table(stock: Run, memo: Run, report: Dict[str, Any], stock_bytes: Optional[Dict[str, Any]], memo_bytes: Optional[Dict[str, Any]], skip: int) -> str:
    """The comparison, for people."""
    lines = [f"{'':34}{'stock':>14}{'memo':>14}{'difference':>13}"]
    for a, b in zip(stock.steps, memo.steps):
        lines.append(_losses(f"loss at step {a.iteration}", a.loss, b.loss))
    for name, loss in stock.evaluations.items():
        lines.append(_losses(f"evaluation, {name}", loss, memo.evaluations[name]))
    lines.append(f"{'largest difference, relative':34}{'':28}{largest_difference(stock, memo):>13.1e}")
    lines.append(_pair("swapped, a forward pass", "-", _mib(report["swapped_bytes"])))
    lines.append(_pair("recomputed, a forward pass", "-", _mib(report["recomputed_bytes"])))
    lines.append(_pair("host memory, peak", "-", _mib(report["host_peak_bytes"])))
    lines.append(_pair("activations, peak (1)", *(_mib(b["peak_bytes"]) if b else "not measured" for b in (stock_bytes, memo_bytes))))
    times = [median_time_ms(run, skip) for run in (stock, memo)]
    lines.append(_pair("time of a step, median (2)", *("not measured" if t is None else f"{t:.1f} ms" for t in times)))
    policy = ", ".join(f"{name} {value}" for name, value in report["policy"].items())
    lines += ["", f"memo: {policy}"]
    measured = memo_bytes or stock_bytes
    if measured:
        lines += textwrap.wrap(f"(1) {measured['method']}", 110, subsequent_indent="    ")
    lines.append(f"(2) of the steps after step {skip}; a GPU copies behind the computation, a CPU cannot")
    return "\n".join(lines)


def _losses(name: str, stock: float, memo: float) -> str:
    return f"{name:34}{stock:>14.6f}{memo:>14.6f}{relative_difference(stock, memo):>13.1e}"


def _pair(name: str, stock: str, memo: str) -> str:
    return f"{name:34}{stock:>14}{memo:>14}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):.2f} MiB"


def read_json(path: Path, *keys: str) -> Dict[str, Any]:
    """A JSON file that has ``keys``. Raises CompareError."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CompareError(f"{path}: cannot be read: {error}.") from error
    missing = [key for key in keys if key not in content]
    if missing:
        raise CompareError(f"{path}: expected {', '.join(keys)}, found no {', '.join(missing)}.")
    return content


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock-log", type=Path, required=True)
    parser.add_argument("--memo-log", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True, help="report.rank0.json of the MEMO run.")
    parser.add_argument("--stock-bytes", type=Path, help="What MEMO_LIVE_BYTES wrote in the stock run.")
    parser.add_argument("--memo-bytes", type=Path, help="What MEMO_LIVE_BYTES wrote in the MEMO run.")
    parser.add_argument("--skip-steps", type=int, default=4, help="Steps that the times leave out: the first ones, and metered ones. Default 4.")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="Largest relative difference of losses. Default 1e-3.")
    args = parser.parse_args(argv)
    try:
        stock, memo = read_log(args.stock_log), read_log(args.memo_log)
        report = read_json(args.report, "policy", "swapped_bytes", "recomputed_bytes", "host_peak_bytes")
        measured = [read_json(path, "peak_bytes", "method") if path else None for path in (args.stock_bytes, args.memo_bytes)]
        difference = largest_difference(stock, memo)
    except CompareError as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 1
    print(table(stock, memo, report, measured[0], measured[1], args.skip_steps))
    if difference > args.tolerance:
        print(f"compare_runs.py: losses differ by {difference:.1e}, expected at most {args.tolerance:.1e}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
