"""The very first step after construction, no warm-up: every parameter's gradient against float64, stock's error and MEMO's side by side.

    python benchmarks/first_step.py --out first_step.json

TransformerEngine's linears overwrite ``main_grad`` in what they take for the first micro-batch; a warm-up, an evaluation or a self-check
that leaves its traces hides what that does to several tiles. So each case builds its model anew. A case passes when no parameter's relative
error (2-norm) is more than --bound times stock's own in the same step. Two controls show that the comparison can fail.
"""

from __future__ import annotations

import argparse
import gc
import traceback
from dataclasses import asdict
from typing import Any, Dict, List, Optional

import torch

import reference
from harness import Shape, Stack, build_block, choose_device, on_gpu, relative_difference, start_parallel, synchronize, versions, write_json
from modes import Mode, attach_memo, parse_mode, stock_attention
from table import first_step_table


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--query-groups", type=int, default=None)
    parser.add_argument("--ffn", type=int, default=4096)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--norm", choices=("RMSNorm", "LayerNorm"), default="RMSNorm")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--tiles", default="1,2,16")
    parser.add_argument("--alphas", default="0,1")
    parser.add_argument("--attention", choices=("te", "fa4"), default="te")
    parser.add_argument("--bound", type=float, default=1.2, help="allowed error over stock's error")
    parser.add_argument("--cpu", action="store_true", help="try the script out with no GPU (unfused only)")
    parser.add_argument("--out", default=None, metavar="FILE")
    return parser.parse_args(argv)


class FirstSteps:
    """Models that all start from the same weights and see the same x and w."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.shape = Shape(
            args.tokens, args.layers, args.hidden, args.heads, args.query_groups or args.heads, args.ffn, args.swiglu, args.micro_batch, 1, args.norm
        )
        first = build_block(self.shape, fused_gradients=False)
        self.weights = {name: p.detach().clone() for name, p in first.named_parameters()}
        stack = Stack(self.shape, first)
        self.truth = reference.gradients(self.shape, first, stack.x, stack.w, stack.rope)

    def fresh(self, fused: bool) -> Stack:
        block = build_block(self.shape, fused_gradients=fused)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.copy_(self.weights[name])
        return Stack(self.shape, block)

    def errors(self, stack: Stack) -> Dict[str, float]:
        """Relative error of each gradient after the step just made."""
        synchronize()
        return {name: relative_difference(gradient, self.truth[name]) for name, gradient in stack.gradients().items()}

    def stock(self, fused: bool) -> Dict[str, float]:
        stack = self.fresh(fused)
        with stock_attention(stack.block.layers, self.args.attention):
            stack.step()
        return self.errors(stack)

    def memo(self, fused: bool, mode: Mode, sabotage: str = "") -> Dict[str, float]:
        """The first step with memo. ``sabotage``: "flag" lets every pass begin as a first micro-batch; "main_grad" loses one weight's gradient."""
        stack = self.fresh(fused)
        session = attach_memo(stack, mode)
        try:
            if sabotage == "flag":
                _set_first_micro_batch(session)
            stack.step()
            session.end_step()
            if sabotage == "main_grad":
                gradient = stack.gradients()["layers.0.mlp.linear_fc2.weight"]
                gradient[: gradient.shape[0] // 16] = 0
            return self.errors(stack)
        finally:
            session.detach()


def _set_first_micro_batch(session: Any) -> None:
    for tile in session.tiled:
        segments, begin = tile.segments, tile.segments.begin

        def begin_first(segments=segments, begin=begin):
            begin()
            for module in segments._layer.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True

        segments.begin = begin_first


def compare(case: str, fused: bool, stock: Dict[str, float], memo: Dict[str, float], bound: float) -> Dict[str, Any]:
    """The parameter with the largest ratio of errors decides."""
    ratios = {name: memo[name] / max(stock[name], 1e-12) for name in stock}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "gradients": "fused" if fused else "unfused",
        "case": case,
        "parameter": worst,
        "ratio": ratios[worst],
        "stock_error": stock[worst],
        "memo_error": memo[worst],
        "ok": bool(ratios[worst] <= bound),
        "stock_errors": stock,
        "memo_errors": memo,
    }


def main(argv: Optional[List[str]] = None) -> Dict[str, Any]:
    args = arguments(argv)
    choose_device(args.cpu)
    from megatron_memo.testing import loopback

    loopback.init(1)
    start_parallel(1)
    steps = FirstSteps(args)
    result: Dict[str, Any] = {
        "benchmark": "first_step", "shape": asdict(steps.shape), "attention": args.attention, "bound": args.bound, "versions": versions(), "cases": []
    }

    def run(case: str, fused: bool, stock: Dict[str, float], mode: Mode, sabotage: str = "") -> None:
        try:
            outcome = compare(case, fused, stock, steps.memo(fused, mode, sabotage), args.bound)
        except Exception as error:  # the other cases still say something
            traceback.print_exc(limit=-5)
            outcome = {"gradients": "fused" if fused else "unfused", "case": f"{case}: {error}"[:300], "parameter": "", "ratio": 1e9,
                       "stock_error": 0.0, "memo_error": 1e9, "ok": False}
        outcome["control"] = bool(sabotage)
        result["cases"].append(outcome)
        write_json(args.out, result)
        gc.collect()

    for fused in (True, False) if on_gpu() else (False,):
        stock = steps.stock(fused)
        again = compare("stock again", fused, stock, steps.stock(fused), args.bound)
        result["cases"].append({**again, "control": False})
        for tiles in args.tiles.split(","):
            for alpha in args.alphas.split(","):
                run(f"{tiles} tiles, alpha {alpha}", fused, stock, parse_mode(f"memo:{tiles}:{alpha}:0", args.attention))
        four = parse_mode("memo:4:1:0", args.attention)
        run("control: part of a gradient lost", fused, stock, four, "main_grad")
        if fused:
            run("control: first micro-batch flag left on", fused, stock, four, "flag")
    result["ok"] = all(case["ok"] != case["control"] for case in result["cases"])
    write_json(args.out, result)
    print(first_step_table([result]))
    print("every case within the bound, every control outside" if result["ok"] else "FAILED")
    return result


if __name__ == "__main__":
    raise SystemExit(0 if main()["ok"] else 1)
