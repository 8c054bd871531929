"""Causal core attention: q [s, b, heads, d], k and v [s, b, groups, d] to o [s, b, heads * d].

    attend = make_backend("fa4", scale=head_dim ** -0.5)
    o = attend(q, k, v)

All kernels here are exact, causal, without dropout, and never hold an [s, s] matrix; one that would need it is refused. Inputs go to the
kernel as views. The result is a view of what the kernel wrote, so that what autograd saves and what the caller keeps is one storage: contiguous
where the kernel writes rows sample by sample as Megatron does (always with one sample; torch's CPU and cuDNN kernels with any), else a
dense [s, b, heads * d] view whose samples lie one after another (FlashAttention-4 with several samples).
"""

from __future__ import annotations

import importlib.metadata
import os
from functools import partial
from typing import Callable, List, Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import AttentionError, ConfigError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Fastest first. The math kernel is in neither list: it holds [s, s] matrices.
_HALF_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
_FLOAT32_KERNELS = [SDPBackend.EFFICIENT_ATTENTION]
_CPU_KERNELS = [SDPBackend.FLASH_ATTENTION]
_HALF = (torch.float16, torch.bfloat16)

# TransformerEngine chooses among these by itself, so they are part of what Megatron's own attention is.
_HOST_PACKAGES = ("transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4", "megatron-core")


def make_backend(name: str, *, scale: float) -> Attend:
    """The kernel ``name`` ("fa4" or "sdpa"), with ``scale`` as the factor of q k^T.

    Raises AttentionError where the kernel cannot run on this machine, ConfigError for another name.
    """
    if name not in ("fa4", "sdpa"):
        raise ConfigError(f"--memo-attention {name}: expected fa4 or sdpa; Megatron's own attention (host) needs no other kernel.")
    reason = available(name)
    if reason is not None:
        raise AttentionError(reason)
    return partial(fa4_attention if name == "fa4" else sdpa_attention, scale=scale)


def available(name: str) -> Optional[str]:
    """None if the backend ``name`` can run on this machine, else why it cannot and what to do."""
    if name != "fa4":
        return None
    try:
        from flash_attn.cute import flash_attn_func  # noqa: F401
    except Exception as error:  # Its compiler raises many types when a part or a driver is missing.
        return (
            f"--memo-attention fa4: FlashAttention-4 cannot be imported ({type(error).__name__}: {error}). Install it (pip install flash-attn-4), "
            "or take --memo-attention sdpa or host."
        )
    if not torch.cuda.is_available():
        return "--memo-attention fa4: FlashAttention-4 needs a CUDA GPU and torch finds none. Take --memo-attention sdpa."
    return None


def describe(name: str) -> str:
    """The backend with all versions and settings that decide its results: for messages, and as a key of what was found about it."""
    if name == "fa4":
        return f"flash-attn-4 {_version('flash-attn-4') or '(not installed)'}"
    cudnn = f", cuDNN {torch.backends.cudnn.version()}" if torch.backends.cudnn.is_available() else ""
    if name == "sdpa":
        return f"torch {torch.__version__} scaled_dot_product_attention{cudnn}"
    if name == "host":
        found = [f"{package} {version}" for package in _HOST_PACKAGES if (version := _version(package)) is not None]
        settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NVTE_")]
        return f"Megatron's own attention ({', '.join([*found, f'torch {torch.__version__}{cudnn}', *settings])})"
    raise ConfigError(f"--memo-attention {name}: expected host, fa4 or sdpa.")


def fa4_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """FlashAttention-4, called directly: float16 and bfloat16 on a CUDA GPU. Raises AttentionError for anything else."""
    _check_shapes("fa4", q, k, v)
    if q.dtype not in _HALF or not q.is_cuda:
        raise AttentionError(
            f"--memo-attention fa4: expected float16 or bfloat16 on a CUDA GPU, found {q.dtype} on {q.device}. Train with --bf16, "
            "or take --memo-attention sdpa."
        )
    return _fa4(q, k, v, scale)


def _fa4(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_func

    # No window argument: 4.0.0b36 takes a left window of -1 for a window, and then attends to almost nothing.
    o = flash_attn_func(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), softmax_scale=scale, causal=True)
    o = o[0] if isinstance(o, tuple) else o
    return o.transpose(0, 1).flatten(2)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention: cuDNN, else flash, for half precisions on a GPU; memory-efficient for float32 there; flash on a CPU.

    Raises AttentionError where no kernel does without an [s, s] matrix.
    """
    _check_shapes("sdpa", q, k, v)
    shared = q.shape[2] // k.shape[2]
    if shared > 1 and q.is_cuda and q.dtype not in _HALF:
        # The memory-efficient kernel, the only one for float32 there, knows no groups.
        k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
        shared = 1
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
    try:
        with sdpa_kernel(_kernels(q), set_priority=True):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared > 1)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise AttentionError(
            f"--memo-attention sdpa: no kernel of torch {torch.__version__} takes {q.dtype} with {q.shape[-1]} elements a head on {q.device} "
            f"without holding an [s, s] matrix ({error}). Take --memo-attention host or fa4."
        ) from error
    return o.permute(2, 0, 1, 3).flatten(2)


def _kernels(q: Tensor) -> List[SDPBackend]:
    if not q.is_cuda:
        return _CPU_KERNELS
    return _HALF_KERNELS if q.dtype in _HALF else _FLOAT32_KERNELS


def _check_shapes(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise AttentionError(
            f"--memo-attention {name}: expected q [s, b, heads, d], k and v [s, b, groups, d] with heads a multiple of groups, found "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}. Take --memo-attention host."
        )


def _version(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
