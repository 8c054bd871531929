"""Causal core attention: q [s, b, heads, d], k and v [s, b, groups, d] to o [s, b, heads * d]."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from typing import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import AttentionError, ConfigError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Kernels that never hold an [s, s] matrix, fastest first.
_SDPA_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def make_backend(name: str, *, scale: float) -> Attend:
    """The kernel ``name`` ("fa4" or "sdpa") with the softmax scale ``scale``. Raises AttentionError where it cannot run here."""
    if name == "fa4":
        return partial(_fa4, _flash_attention_4(), scale)
    if name == "sdpa":
        return partial(_sdpa, scale)
    raise ConfigError(f"--memo-attention {name}: expected fa4 or sdpa; Megatron's own attention needs no other kernel.")


def describe(name: str) -> str:
    """The backend with its version, for messages and for what is remembered about it."""
    package = {"fa4": "flash-attn-4", "host": "transformer-engine", "sdpa": "torch"}[name]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    if name == "host" and version == "not installed":
        return "Megatron's own attention (local)"
    return {"host": "Megatron's own attention (", "fa4": "FlashAttention-4 (", "sdpa": "torch scaled_dot_product_attention ("}[name] + f"{package} {version})"


def _flash_attention_4() -> Callable[..., Tensor]:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise AttentionError(
            f"--memo-attention fa4: FlashAttention-4 cannot be imported ({error}). Install flash-attn-4, or take --memo-attention sdpa or host."
        ) from error
    return flash_attn_func


def _fa4(kernel: Callable[..., Tensor], scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # No window argument: 4.0.0b36 takes a left window of -1 for a window, and then attends to almost nothing.
    o = kernel(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), softmax_scale=scale, causal=True)
    o = o[0] if isinstance(o, tuple) else o
    return o.transpose(0, 1).reshape(q.shape[0], q.shape[1], -1)


def _sdpa(scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[2] // k.shape[2]
    if shared > 1:
        k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
    try:
        if q.is_cuda:
            with sdpa_kernel(_SDPA_KERNELS, set_priority=True):
                o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    except RuntimeError as error:
        raise AttentionError(
            f"--memo-attention sdpa: no kernel of torch {torch.__version__} takes {q.dtype} with {q.shape[-1]} elements a head on {q.device} without an "
            f"[s, s] matrix ({error}). Take --memo-attention host or fa4."
        ) from error
    return o.permute(2, 0, 1, 3).reshape(q.shape[2], q.shape[0], -1)
