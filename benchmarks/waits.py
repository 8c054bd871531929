"""Each wait between compute and the copies left out once, on the device, with copies or compute slowed so that it matters.

    python benchmarks/waits.py --out waits.json

A missed wait corrupts a layer without any other sign, so gradients are compared with stock Megatron's. The intact executor under the same
delays must agree with stock; each mutant must not. Every case first makes a step on another input, so that stale memory holds wrong data.
"""

from __future__ import annotations

import argparse
import os
import traceback
from dataclasses import asdict
from typing import Any, Dict, List, Optional

import torch

from harness import Shape, Stack, build_block, choose_device, on_gpu, start_parallel, synchronize, versions, worst_difference, write_json
from modes import attach_memo, parse_mode
from table import waits_table

CYCLES_PER_MS = 1_900_000  # of torch.cuda._sleep; about right is enough


class Altered:
    """A device's streams with one wait left out and delays put in. Everything else goes to ``streams``.

    Args:
        left_out: the Order that is not waited for, or None.
        copy_delay_ms: by Stream, device time before each of its copies.
    """

    def __init__(self, streams: Any, left_out: Any, copy_delay_ms: Dict[Any, float]) -> None:
        self._streams, self._left_out, self._copy_delay_ms = streams, left_out, copy_delay_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def wait(self, stream: Any, event: Any, order: Any) -> None:
        if order is not self._left_out:
            self._streams.wait(stream, event, order)

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        delay_ms = self._copy_delay_ms.get(stream, 0.0)
        if delay_ms and on_gpu():
            with torch.cuda.stream(self._streams._queue(stream)):
                torch.cuda._sleep(int(delay_ms * CYCLES_PER_MS))
        self._streams.copy(stream, destination, source)


def plain_step(stack: Stack, compute_delay_ms: float) -> Dict[str, torch.Tensor]:
    """A step; compute may start late, so that everything is queued before it runs."""
    if compute_delay_ms and on_gpu():
        torch.cuda._sleep(int(compute_delay_ms * CYCLES_PER_MS))
    stack.zero_main_grads()
    stack.step()
    return stack.gradients()


def interleaved_step(stack: Stack, compute_delay_ms: float) -> Dict[str, torch.Tensor]:
    """Backward of all layers but the first; then another forward pass, which gets the host slots that the first layer's prefetch has just
    read or will read; then the first layer's backward. Gives the gradients of x and of the first layer."""
    stack.clear()
    stack.zero_main_grads()
    outputs: List[torch.Tensor] = []
    handle = stack.block.layers[0].register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    try:
        y = stack.block(hidden_states=stack.x, attention_mask=None, rotary_pos_emb=stack.rope)
        first = outputs[0]
        (gradient,) = torch.autograd.grad(y, [first], stack.w)
        del y
        other = (-2 * stack.x.detach()).requires_grad_()
        z = stack.block(hidden_states=other, attention_mask=None, rotary_pos_emb=stack.rope)
        torch.autograd.backward(first, gradient)
    finally:
        handle.remove()
    found = {"x": stack.x.grad}
    for name, parameter in stack.block.named_parameters():
        if name.startswith("layers.0."):
            found[name] = parameter.main_grad if getattr(parameter, "grad_added_to_main_grad", False) else parameter.grad
    del z
    return found


def copies(gradients: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    synchronize()
    return {name: gradient.detach().clone() for name, gradient in gradients.items()}


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=4096)
    parser.add_argument("--cpu", action="store_true", help="the simulator instead of a GPU, on small sizes")
    parser.add_argument("--out", default=None, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None) -> Dict[str, Any]:
    # With one hardware queue a delayed copy holds back the kernels behind it, whatever stream they are on, and hides what a missing wait does.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    args = arguments(argv)
    choose_device(args.cpu)
    from megatron_memo.swap.simulator import SimulatedStreams
    from megatron_memo.swap.streams import CudaStreams, Order, Stream
    from megatron_memo.testing import loopback

    loopback.init(1)
    start_parallel(1)
    shape = Shape(args.tokens, args.layers, args.hidden, args.heads, args.heads, args.ffn, tp=1)
    stack = Stack(shape, build_block(shape))
    x, other = stack.x.detach().clone(), torch.randn_like(stack.x)

    def set_input(value: torch.Tensor) -> None:
        with torch.no_grad():
            stack.x.copy_(value)

    stock = {step: copies(step(stack, 0.0)) for step in (plain_step, interleaved_step)}
    # (left out, step, mode, delay of compute's start, delays of copies), the delays in ms
    half, none = "memo:4:0.5:0", "memo:2:0:0"
    cases = [
        (Order.PRODUCED, plain_step, half, 500.0, {}),
        (Order.LEFT, plain_step, half, 0.0, {Stream.OUT: 10.0}),
        (Order.LANDING_FREE, plain_step, half, 500.0, {}),
        (Order.ARRIVED, plain_step, half, 0.0, {Stream.IN: 10.0}),
        (Order.SLOT_READ, interleaved_step, none, 0.0, {Stream.IN: 200.0}),
    ]
    result: Dict[str, Any] = {"benchmark": "waits", "shape": asdict(shape), "versions": versions(), "waits": []}
    for order, step, mode, compute_delay_ms, copy_delay_ms in cases:
        for left_out in (None, order):
            entry = {
                "order": order.name if left_out else f"nothing (delays of {order.name})",
                "meaning": order.value,
                "scenario": f"{step.__name__.replace('_', ' ')}, {mode}",
                "mutant": left_out is not None,
            }
            streams = CudaStreams(stack.x.device) if on_gpu() else SimulatedStreams()
            try:
                session = attach_memo(stack, parse_mode(mode, "te"), streams=Altered(streams, left_out, copy_delay_ms))
                try:
                    set_input(other)
                    copies(step(stack, compute_delay_ms))
                    set_input(x)
                    found = copies(step(stack, compute_delay_ms))
                finally:
                    synchronize()
                    session.detach()
                    set_input(x)
                entry["difference"], entry["of"] = worst_difference(found, stock[step])
            except Exception as error:
                traceback.print_exc(limit=-5)
                entry.update(difference=-1.0, of="", error=str(error)[:400])
            result["waits"].append(entry)
            write_json(args.out, result)
    intact = [entry["difference"] for entry in result["waits"] if not entry["mutant"]]
    threshold = 5 * max(*intact, 2e-3)
    for entry in result["waits"]:
        entry["seen"] = bool(entry["difference"] > threshold)
    result["threshold"] = threshold
    result["ok"] = threshold < 0.1 and all(entry["seen"] == entry["mutant"] and "error" not in entry for entry in result["waits"])
    write_json(args.out, result)
    print(waits_table([result]))
    print(f"every mutant above {threshold:.1e}, the intact executor below" if result["ok"] else "FAILED")
    return result


if __name__ == "__main__":
    raise SystemExit(0 if main()["ok"] else 1)
