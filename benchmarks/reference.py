"""The layer stack once more, in float64 and plain torch: what a gradient should have been.

Covers what the benchmarks build: pre-norm layers, no biases on linears, RMSNorm or LayerNorm, GELU or SwiGLU, grouped queries, RoPE, causal
attention with every score kept (small sizes only). Nothing of Megatron runs here; only its parameter names and the order in which the
qkv weight holds its rows (per query group: its queries, its key, its value) are known.
"""

from __future__ import annotations

from typing import Dict, Optional

import torch
from torch import Tensor
from torch.nn import functional

from harness import Shape

EPSILON = 1e-5  # Megatron's layernorm_epsilon


def _first(weights: Dict[str, Tensor], *names: str) -> Optional[Tensor]:
    return next((weights[name] for name in names if name in weights), None)


def _norm(x: Tensor, weight: Tensor, bias: Optional[Tensor], kind: str) -> Tensor:
    if kind == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight
    return functional.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [s, b, heads, d] by angles [s, 1, 1, d]; the second half of d goes with the first."""
    a, b = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [s, b, heads, d], k and v [s, b, groups, d] to [s, b, heads * d], causal."""
    s, b, heads, d = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), v).reshape(s, b, heads * d)


def layer(shape: Shape, weights: Dict[str, Tensor], x: Tensor, angles: Optional[Tensor]) -> Tensor:
    """One layer [s, b, h] -> [s, b, h]; ``weights`` by Megatron's names, of the local or the TransformerEngine spec."""
    s, b, _ = x.shape
    normed = _norm(
        x,
        _first(weights, "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        _first(weights, "input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"),
        shape.norm,
    )
    mixed = (normed @ weights["self_attention.linear_qkv.weight"].t()).view(s, b, shape.query_groups, -1)
    q, k, v = mixed.split([shape.heads // shape.query_groups * shape.head_dim, shape.head_dim, shape.head_dim], dim=-1)
    q = q.reshape(s, b, shape.heads, shape.head_dim)
    if angles is not None:
        q, k = _rotate(q, angles), _rotate(k, angles)
    x = x + _attention(q, k, v) @ weights["self_attention.linear_proj.weight"].t()
    normed = _norm(
        x,
        _first(weights, "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        _first(weights, "pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"),
        shape.norm,
    )
    inner = normed @ weights["mlp.linear_fc1.weight"].t()
    if shape.gated:
        gate, up = inner.chunk(2, dim=-1)
        inner = functional.silu(gate) * up
    else:
        inner = functional.gelu(inner)
    return x + inner @ weights["mlp.linear_fc2.weight"].t()


def gradients(shape: Shape, block: torch.nn.Module, x: Tensor, w: Tensor, angles: Optional[Tensor]) -> Dict[str, Tensor]:
    """Gradients of sum(y * w) in float64, of ``x`` and of every parameter of ``block`` by name. tp must be 1."""
    if shape.tp != 1:
        raise ValueError(f"the float64 reference computes whole layers: expected tp 1, found {shape.tp}")
    leaves = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    start = x.detach().double().requires_grad_()
    y = start
    for index in range(shape.layers):
        prefix = f"layers.{index}."
        weights = {name[len(prefix):]: leaf for name, leaf in leaves.items() if name.startswith(prefix)}
        y = layer(shape, weights, y, None if angles is None else angles.double())
    found = torch.autograd.grad(y, [start, *leaves.values()], w.double())
    return dict(zip(["x", *leaves], found))
