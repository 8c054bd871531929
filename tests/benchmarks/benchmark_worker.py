"""What the benchmarks say about small stacks of Megatron's own layers with no GPU, as JSON on the last line of the output."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import harness
import modes
import reference
import torch


def reference_differences():
    """The float64 reference against Megatron's own layers in float64, with norm weights that are not all one."""
    found = {}
    for name, settings in {
        "no rope": dict(rope=False),
        "rope": dict(),
        "swiglu, grouped, layer norm": dict(gated=True, query_groups=2, norm="LayerNorm", micro_batch=2, rope=False),
    }.items():
        shape = harness.Shape(**{**dict(tokens=40, layers=2, hidden=48, heads=4, query_groups=4, ffn=96, tp=1), **settings})
        block = harness.build_block(shape, dtype=torch.float64)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        stack = harness.Stack(shape, block)
        stack.step()
        found[name] = harness.worst_difference(stack.gradients(), reference.gradients(shape, block, stack.x, stack.w, stack.rope))[0]
    return found


def forward_calls():
    """How often the layers run forward in a step of each mode; keep-all again at the end."""
    shape = harness.Shape(tokens=32, layers=3, hidden=32, heads=2, query_groups=2, ffn=64, tp=1)
    stack = harness.Stack(shape, harness.build_block(shape))
    calls = []
    stack.block.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for text in ("keep-all", "full-recompute", "keep-all"):
        before = len(calls)
        with modes.running(stack, modes.parse_mode(text, "te")) as now:
            now.step()
        found.append(len(calls) - before)
    return found


def shared_parameters():
    """Two blocks, one set of weights."""
    shape = harness.Shape(tokens=32, layers=1, hidden=32, heads=2, query_groups=2, ffn=64, tp=1)
    stack, other = harness.Stack(shape, harness.build_block(shape)), harness.build_block(shape)
    modes.share_parameters(stack.block, other)
    stack.step(other)
    return all(p is q for p, q in zip(stack.block.parameters(), other.parameters())) and len(stack.gradients())


def main():
    torch.set_num_threads(1)
    harness.use_cpu()
    from megatron_memo.testing import loopback

    loopback.init(1)
    harness.start_parallel(1)
    print(json.dumps({"reference": reference_differences(), "forward_calls": forward_calls(), "shared": shared_parameters()}))


if __name__ == "__main__":
    main()
