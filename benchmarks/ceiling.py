"""How fast one layer could be: attention and GEMM rates measured now, at the length and on the backend of the run.

    python benchmarks/ceiling.py --tokens 1048576 --attention fa4

The ceiling of a layer is attention forward + attention backward + three times the linears forward, each at its measured rate, with nothing
else in between and nothing computed twice. Rates differ from call to call (power, clocks), so a share of the ceiling is of the same call's.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

import torch

from harness import Shape, attention_flops, checked_tflops, choose_device, device, linear_flops, on_gpu, step_flops, synchronize, versions, write_json


def timed(work: Callable[[], Any]) -> Tuple[float, Any]:
    """Seconds that ``work`` takes on the device, and what it returns."""
    if not on_gpu():
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    result = work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3, result


def core_attention(shape: Shape, attention: str) -> Callable:
    """A function of q, k, v [s, b, heads, d] to o, causal: TransformerEngine's choice ("te"), FlashAttention-4 ("fa4"), or torch's ("sdpa")."""
    heads, groups = shape.heads // shape.tp, shape.query_groups // shape.tp
    if attention == "fa4":
        from modes import fa4_attention

        return fa4_attention
    if attention == "te":
        from transformer_engine.pytorch import DotProductAttention

        return DotProductAttention(
            heads, shape.head_dim, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal"
        )

    def sdpa(q, k, v):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != heads)

    return sdpa


def attention_samples(shape: Shape, attention: str, repeats: int) -> List[Tuple[float, float]]:
    """(forward, backward) seconds of one layer's attention on one rank, ``repeats`` times after a warm-up."""
    core = core_attention(shape, attention)
    heads, groups = shape.heads // shape.tp, shape.query_groups // shape.tp

    def run(tokens: int) -> Tuple[float, float]:
        make = lambda n: torch.randn(tokens, shape.micro_batch, n, shape.head_dim, device=device(), dtype=torch.bfloat16, requires_grad=True)
        q, k, v = make(heads), make(groups), make(groups)
        forward_s, o = timed(lambda: core(q, k, v))
        do = torch.randn_like(o)
        synchronize()
        backward_s, _ = timed(lambda: torch.autograd.grad(o, (q, k, v), do))
        return forward_s, backward_s

    run(min(shape.tokens, 16384))
    return [run(shape.tokens) for _ in range(repeats)]


def linear_seconds(shape: Shape, rows: int, repeats: int) -> Tuple[float, Dict[str, Dict[str, float]]]:
    """Seconds of one layer's linears forward on one rank, from the rates of ``rows`` rows at a time; and each linear's rates in TFLOP/s.

    The three passes (output, input gradient, weight gradient) are measured apart and averaged by their time.
    """
    rates: Dict[str, Dict[str, float]] = {}
    total_s = 0.0
    for name, (inputs, outputs) in shape.linears.items():
        make = lambda *size: torch.randn(*size, device=device(), dtype=torch.bfloat16)
        x, dy, weight = make(rows, inputs), make(rows, outputs), make(outputs, inputs) / inputs**0.5
        passes = {"forward": lambda: x @ weight.t(), "input_gradient": lambda: dy @ weight, "weight_gradient": lambda: dy.t() @ x}
        rates[name] = {}
        for which, work in passes.items():
            for _ in range(2):
                work()
            seconds = median(timed(work)[0] for _ in range(repeats))
            rates[name][which] = checked_tflops(f"{name} {which} of {rows} rows", 2.0 * rows * inputs * outputs, seconds)
            total_s += seconds / 3 * shape.tokens * shape.micro_batch / rows
    return total_s, rates


def measure(shape: Shape, attention: str, repeats: int = 2, gemm_rows: int = 65536) -> Dict[str, Any]:
    """The samples of one measurement; :func:`combine` makes a ceiling of one or more."""
    rows = min(gemm_rows, shape.tokens * shape.micro_batch)
    linears_s, rates = linear_seconds(shape, rows, repeats=10)
    samples = attention_samples(shape, attention, repeats)
    for seconds, what, factor in ((min(f for f, _ in samples), "forward", 1.0), (min(b for _, b in samples), "backward", 2.5)):
        checked_tflops(f"{attention} attention {what}", factor * attention_flops(shape), seconds)
    return {"attention": attention, "gemm_rows": rows, "linears_forward_s": linears_s, "gemm_tflops": rates, "attention_samples_s": samples}


def combine(shape: Shape, measurements: List[Dict[str, Any]]) -> Dict[str, Any]:
    """One ceiling from measurements before and after a run: medians of all attention samples, the fastest linears."""
    samples = [sample for m in measurements for sample in m["attention_samples_s"]]
    forward_s, backward_s = median(s[0] for s in samples), median(s[1] for s in samples)
    linears_s = min(m["linears_forward_s"] for m in measurements)
    layer_s = forward_s + backward_s + 3 * linears_s
    return {
        "attention": measurements[0]["attention"],
        "attention_forward_s": forward_s,
        "attention_backward_s": backward_s,
        "attention_forward_tflops": attention_flops(shape) / forward_s / 1e12,
        "attention_backward_tflops": 2.5 * attention_flops(shape) / backward_s / 1e12,
        "linears_forward_s": linears_s,
        "linears_tflops": linear_flops(shape) / linears_s / 1e12,
        "layer_s": layer_s,
        "step_s": layer_s * shape.layers,
        "tflops": checked_tflops("ceiling", step_flops(shape), layer_s * shape.layers),
        "measurements": measurements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1048576)
    parser.add_argument("--attention", choices=("te", "fa4", "sdpa"), default="fa4")
    parser.add_argument("--tp", type=int, default=8, help="heads and linears are divided by this, as on one rank")
    parser.add_argument("--gemm-rows", type=int, default=65536, help="rows of one GEMM, as of one tile")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--ffn", type=int, default=16384)
    parser.add_argument("--cpu", action="store_true", help="try the script out with no GPU")
    parser.add_argument("--out", default=None, metavar="FILE")
    args = parser.parse_args()
    choose_device(args.cpu)
    shape = Shape(args.tokens, 1, args.hidden, args.heads, args.heads, args.ffn, tp=args.tp)
    result = combine(shape, [measure(shape, args.attention, args.repeats, args.gemm_rows)])
    result = {"benchmark": "ceiling", "tokens": args.tokens, "tp": args.tp, "versions": versions(), **result}
    write_json(args.out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "measurements"}, indent=1))


if __name__ == "__main__":
    main()
