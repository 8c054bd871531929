"""The planner alone, on a trace in minimalloc's CSV format.

    python -m megatron_memo.plan TRACE.csv [--capacity BYTES] [--seconds S] [--out PLAN.csv] [--picture PLAN.png]

Exit status: 0 a plan was found (that fits the capacity, if there is one), 3 it does not fit the capacity, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from typing import List, Optional

from ..errors import MemoError
from .caching import CachingSettings, simulate
from .csv_format import read_trace, write_plan
from .errors import InvalidPlanError, PictureError
from .picture import draw, require_library
from .planner import make_plan
from .records import Plan, Settings

FITS, BAD_INPUT, DOES_NOT_FIT = 0, 2, 3


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_memo.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE.csv", help="id,lower,upper,size[,layer]; lifetimes half open, sizes in bytes")
    parser.add_argument("--capacity", type=_positive_int, default=None, metavar="BYTES", help="stop at the first plan that fits; without it the peak is made small")
    parser.add_argument("--seconds", type=_positive_float, default=60.0, metavar="S", help="time for planning (default 60)")
    parser.add_argument("--alignment", type=_positive_int, default=1, metavar="BYTES", help="of every offset; sizes are rounded up to it (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the searches (default 0)")
    parser.add_argument("--workers", type=_positive_int, default=None, metavar="N", help="threads (default: all cores); the plan does not depend on it")
    parser.add_argument("--out", default=None, metavar="PLAN.csv", help="write the trace with the column offset")
    parser.add_argument("--picture", default=None, metavar="PLAN.png", help="draw the plan (needs matplotlib)")
    parser.add_argument("--caching", action="store_true", help="also simulate what PyTorch's caching allocator would reserve for this trace")
    return parser.parse_args(argv)


def _positive_int(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text!r}")
    return value


def describe(plan: Plan, buffers: int, capacity_bytes: Optional[int]) -> str:
    """What the command prints about a plan."""
    levels = f"two levels, {plan.layer_kinds} kinds of layer passes" if plan.layer_kinds else "one level"
    if plan.proved:
        proof = "yes, no plan needs less"
    else:
        proof = f"no, between {plan.proven_bytes} and {plan.peak_bytes} bytes nothing is known"
    lines = [
        f"buffers   {buffers}",
        f"bound     {plan.bound_bytes} bytes live at once",
        f"peak      {plan.peak_bytes} bytes",
        f"ratio     {plan.ratio:.6f}",
        f"found by  {plan.method} ({levels})",
        f"proved    {proof}",
        f"seconds   {plan.seconds:.2f}" + ("" if plan.repeatable else " (the clock ended a search: another run may find another plan)"),
    ]
    if capacity_bytes is not None:
        over = plan.peak_bytes - capacity_bytes
        if over <= 0:
            fits = f"fits, {-over} bytes to spare"
        elif plan.proven_bytes > capacity_bytes:
            fits = f"does not fit, and no plan does: {plan.proven_bytes} bytes are needed at least"
        else:
            fits = f"does not fit, {over} bytes too many; a plan that fits may exist (--seconds, --seed)"
        lines.append(f"capacity  {capacity_bytes} bytes: {fits}")
    return "\n".join(lines)


def main(argv: Optional[List[str]] = None) -> int:
    args = arguments(argv)
    try:
        if args.picture:
            require_library()
        buffers = read_trace(args.trace)
        plan = make_plan(buffers, Settings(args.seconds, args.capacity, args.alignment, args.workers, args.seed))
        print(describe(plan, len(buffers), args.capacity))
        if args.caching:
            for settings in (CachingSettings(), CachingSettings(expandable=True)):
                native = simulate(buffers, settings)
                print(f"{settings.name}: {native.reserved_bytes} bytes reserved for {native.allocated_bytes} allocated (simulated)")
        if args.out:
            write_plan(args.out, buffers, plan.offsets_bytes)
        if args.picture:
            draw(args.picture, buffers, plan, args.capacity)
    except InvalidPlanError:
        raise  # not the input's fault: with its trace
    except (MemoError, PictureError) as error:
        print(f"python -m megatron_memo.plan: {error}", file=sys.stderr)
        return BAD_INPUT
    return FITS if args.capacity is None or plan.peak_bytes <= args.capacity else DOES_NOT_FIT


if __name__ == "__main__":
    raise SystemExit(main())
