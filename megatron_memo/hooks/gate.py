"""The attention output's gate, o * sigmoid(gate), of which only o and the gate are saved.

Upstream's function saves a float32 sigmoid besides: as large as two attention outputs, for the whole sequence, and a copy of what o and the
gate already say. The gate is rebuilt with q, k and v before attention's backward pass, so the function runs there once more.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

Apply = Callable[[Tensor, Tensor], Tensor]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, apply: Apply, o: Tensor, gate: Tensor) -> Tensor:
        ctx.gated = apply
        ctx.save_for_backward(o, gate)
        return apply(o, gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            gated = ctx.gated(*inputs)
        return (None, *torch.autograd.grad(gated, inputs, gradient))


def gated(apply: Apply, o: Tensor, gate: Tensor) -> Tensor:
    """o [s, b, heads * d] through its gate [s, b, heads, d]. ``apply`` is Megatron's function of both."""
    return _Gate.apply(apply, o, gate)
