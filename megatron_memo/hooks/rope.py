"""Rotary embedding of a tile's rows that saves nothing.

Megatron's unfused RoPE saves cos and sin of every row for q and for k, which tensor parallelism does not divide (1.0 GiB a layer at one
million tokens), and a tile's rows of the frequencies are a copy with sequence parallelism. RoPE is linear in q and k, so its gradient needs
no activation: the backward pass runs the same upstream function again, on the gradient, and asks autograd for its transpose.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ..tiles.grid import Grid

Apply = Callable[[Tensor, Tensor], Tensor]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, apply: Apply, rope: Tuple[Tensor, Tensor], grid: Grid, start: int, stop: int) -> Tuple[Tensor, Tensor]:
        # The frequencies are one storage for all layers and need no gradient: kept by reference, cut again in the backward pass.
        ctx.rotation, ctx.rope, ctx.place = apply, rope, (grid, start, stop)
        return tuple(apply(tensor, rows) for tensor, rows in zip((q, k), _rows(rope, *ctx.place)))

    @staticmethod
    def backward(ctx: Any, dq: Optional[Tensor], dk: Optional[Tensor]) -> Any:
        gradients = []
        for gradient, rows in zip((dq, dk), _rows(ctx.rope, *ctx.place)):
            # Any values do for the input: the map is linear. The gradient has the right shape and type.
            with torch.enable_grad():
                point = gradient.detach().requires_grad_()
                image = ctx.rotation(point, rows)
            gradients.append(torch.autograd.grad(image, point, gradient)[0])
        return (*gradients, None, None, None, None, None)


def _rows(rope: Tuple[Tensor, Tensor], grid: Grid, start: int, stop: int) -> Tuple[Tensor, Tensor]:
    q_rows = grid.take(rope[0], start, stop)
    return q_rows, (q_rows if rope[1] is rope[0] else grid.take(rope[1], start, stop))


def rotate(q: Tensor, k: Tensor, apply: Apply, rope: Tuple[Tensor, Tensor], grid: Grid, start: int, stop: int) -> Tuple[Tensor, Tensor]:
    """q and k [shards * (stop - start), b, heads, d] with their rotary embedding.

    Args:
        apply: Megatron's function of a tensor and its rows of frequencies.
        rope: whole-sequence frequencies [shards * s, 1, 1, d] of q and k.
        grid, start, stop: the tile's rows.
    """
    return _Rope.apply(q, k, apply, rope, grid, start, stop)
