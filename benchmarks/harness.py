"""What the benchmarks share: one rank's layer stack, counting of operations and bytes, versions.

The stack is Megatron's own TransformerBlock. On a GPU it uses TransformerEngine's layer spec and fused weight gradients into float32
``main_grad``, as Megatron's training does; with ``cpu=True`` Megatron's local spec, only for trying the scripts out.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package, also where it is not installed

GIB = 2**30
# Dense bf16 TFLOP/s by NVIDIA's datasheets, by a part of the device's name.
PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "A100": 312.0, "A800": 312.0}


class ImplausibleRate(RuntimeError):
    """A measured rate above the chip's peak: something was not computed."""


# --- the shape of the work and its operations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A stack of transformer layers and what one step feeds it. ``tokens`` is the whole sequence, all ranks together."""

    tokens: int
    layers: int
    hidden: int = 4096
    heads: int = 32
    query_groups: int = 32
    ffn: int = 16384
    gated: bool = False
    micro_batch: int = 1
    tp: int = 8
    norm: str = "RMSNorm"
    rope: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def rows(self) -> int:
        """Rows of hidden_states of one rank: sequence parallelism shards them when tp > 1."""
        return self.tokens // self.tp

    @property
    def linears(self) -> Dict[str, Tuple[int, int]]:
        """(inputs, outputs) of each linear on one rank, column-parallel ones split by output, row-parallel ones by input."""
        attention = self.heads * self.head_dim
        both = attention + 2 * self.query_groups * self.head_dim
        return {
            "qkv": (self.hidden, both // self.tp),
            "proj": (attention // self.tp, self.hidden),
            "fc1": (self.hidden, self.ffn * (2 if self.gated else 1) // self.tp),
            "fc2": (self.ffn // self.tp, self.hidden),
        }


def linear_flops(shape: Shape) -> float:
    """Multiplications and additions of one layer's linears in one forward pass on one rank."""
    return 2.0 * shape.tokens * shape.micro_batch * sum(inputs * outputs for inputs, outputs in shape.linears.values())


def attention_flops(shape: Shape) -> float:
    """Of one layer's causal attention forward on one rank: two products of s x s/2 entries. 2 s^2 h a sequence, before tensor parallelism."""
    return 2.0 * shape.tokens**2 * shape.heads * shape.head_dim * shape.micro_batch / shape.tp


def step_flops(shape: Shape) -> float:
    """Model FLOPs of a step on one rank: forward plus twice that for backward; recomputation is not counted (MEMO paper, section 5)."""
    return 3.0 * shape.layers * (linear_flops(shape) + attention_flops(shape))


def peak_tflops() -> Optional[float]:
    """The device's bf16 peak, or None where it is not known (a CPU)."""
    if not on_gpu():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def checked_tflops(what: str, flops: float, seconds: float) -> float:
    """``flops / seconds`` in TFLOP/s. Raises ImplausibleRate above the chip's peak: plausible norms prove nothing, a rate this high disproves."""
    rate = flops / seconds / 1e12
    peak = peak_tflops()
    if peak is not None and rate > peak:
        raise ImplausibleRate(
            f"{what}: {flops:.4g} operations in {seconds:.4f} s are {rate:.0f} TFLOP/s, above this chip's peak of {peak} TFLOP/s. "
            "Part of the work was skipped (a mask or window that the backend takes otherwise?); compare its output with a float32 reference."
        )
    return rate


# --- the process, the device ------------------------------------------------------------------------------------------------------------


def on_gpu() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available() and not _on_cpu


_on_cpu = False


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def choose_device(cpu: bool) -> None:
    """The GPU, or with ``cpu`` none. Call before anything of Megatron is imported. Ends the program where no GPU is and none was asked for."""
    if cpu:
        use_cpu()
    elif not on_gpu():
        raise SystemExit("no GPU here: --cpu tries this script out on small sizes")


def use_cpu() -> None:
    """Lets Megatron run with no GPU."""
    global _on_cpu
    _on_cpu = True
    from megatron_memo.cpu import install

    install()


def synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if on_gpu() else 0


def memory_stats() -> Dict[str, int]:
    """Allocator counters that the reports use; zeros on a CPU."""
    stats = torch.cuda.memory_stats() if on_gpu() else {}
    return {
        "live_peak_bytes": stats.get("allocated_bytes.all.peak", 0),
        "reserved_peak_bytes": stats.get("reserved_bytes.all.peak", 0),
        "segments_made": stats.get("segment.all.allocated", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }


def reset_peaks(empty_cache: bool = False) -> None:
    if on_gpu():
        if empty_cache:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def start_parallel(tp: int, seed: int = 1) -> None:
    """Megatron's groups and random states over the torch.distributed that is already up."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(seed)


def loaded_cudnn() -> Optional[int]:
    """The version of the cuDNN that is loaded. torch raises where TransformerEngine has loaded the system's instead of torch's own."""
    try:
        return int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
    except (OSError, AttributeError):
        return None


def versions() -> Dict[str, Any]:
    """Of everything that a figure may depend on."""
    found: Dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("megatron-core", "transformer-engine", "flash-attn-4", "nvidia-cutlass-dsl", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if on_gpu():
        found.update(gpu=torch.cuda.get_device_name(), cudnn=loaded_cudnn())
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader", "--id=0"]
            answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip().split(", ")
            found.update(zip(("driver", "power_limit", "max_sm_clock"), answer))
    return found


def write_json(path: Optional[str], result: Dict[str, Any]) -> None:
    """Writes ``result`` whole or not at all. Called after every turn, so that a run cut short leaves what it has."""
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".part")
    temporary.write_text(json.dumps(result, indent=1))
    temporary.replace(target)


# --- the layer stack --------------------------------------------------------------------------------------------------------------------


def build_block(shape: Shape, fused_gradients: bool = True, dtype: torch.dtype = torch.bfloat16, **config: Any):
    """A TransformerBlock of ``shape`` on one rank, without a final norm; with ``main_grad`` where weight gradients are fused."""
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpu = on_gpu()
    fused_gradients = fused_gradients and gpu
    settings: Dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        normalization=shape.norm,
        add_bias_linear=False,
        tensor_model_parallel_size=shape.tp,
        sequence_parallel=shape.tp > 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=fused_gradients,
        bias_dropout_fusion=gpu,
        apply_rope_fusion=gpu and shape.rope,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not gpu,
    )
    settings.update(config)
    cfg = TransformerConfig(**settings)
    block = TransformerBlock(config=cfg, spec=_layer_spec(shape), post_layer_norm=False)
    block = block.cuda() if gpu else block.to(dtype=dtype)
    block.train()
    if fused_gradients:
        for parameter in block.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.grad_added_to_main_grad = False
    return block


def _layer_spec(shape: Shape):
    from megatron.core.models.gpt import gpt_layer_specs

    if on_gpu():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    return gpt_layer_specs.get_gpt_layer_local_spec(normalization=shape.norm)


def rope_frequencies(tokens: int, head_dim: int) -> torch.Tensor:
    """Angles [s, 1, 1, head_dim] in float32, base 10000, halves not interleaved."""
    inverse = 1.0 / (10000 ** (torch.arange(0, head_dim, 2, device=device()).float() / head_dim))
    angles = torch.outer(torch.arange(tokens, device=device()).float(), inverse)
    return torch.cat([angles, angles], dim=-1)[:, None, None]


class Stack:
    """A block with the harness's own tensors: the input x, the loss weights w (loss = sum(y * w)) and the RoPE angles.

    A step holds no tensor of its own but x's gradient: backward starts from the edge of the output, with w as its gradient.
    """

    def __init__(self, shape: Shape, block: torch.nn.Module, seed: int = 7) -> None:
        self.shape, self.block = shape, block
        dtype = block.config.params_dtype
        generator = torch.Generator(device=device()).manual_seed(seed)
        size = (shape.rows, shape.micro_batch, shape.hidden)
        self.x = torch.randn(size, generator=generator, device=device(), dtype=dtype).requires_grad_()
        self.w = torch.randn(size, generator=generator, device=device(), dtype=dtype)
        self.rope = rope_frequencies(shape.tokens, shape.head_dim) if shape.rope else None

    @property
    def harness_bytes(self) -> Dict[str, int]:
        return {name: t.untyped_storage().nbytes() for name, t in (("x", self.x), ("w", self.w), ("rope", self.rope)) if t is not None}

    @property
    def static_bytes(self) -> Dict[str, int]:
        parameters = list(self.block.parameters())
        gradients = [p.main_grad for p in parameters if hasattr(p, "main_grad")]
        return {"weights": sum(p.nbytes for p in parameters), "main_grads": sum(g.nbytes for g in gradients)}

    def clear(self) -> None:
        """Drops the gradients of x and of the parameters; ``main_grad`` is zeroed by :meth:`zero_main_grads` only."""
        self.x.grad = None
        for parameter in self.block.parameters():
            parameter.grad = None

    def zero_main_grads(self) -> None:
        for parameter in self.block.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
                parameter.grad_added_to_main_grad = False

    def step(self, block: Optional[torch.nn.Module] = None) -> None:
        """Forward and backward."""
        self.clear()
        y = (block or self.block)(hidden_states=self.x, attention_mask=None, rotary_pos_emb=self.rope)
        edge = torch.autograd.graph.get_gradient_edge(y)
        del y
        torch.autograd.backward(edge, self.w)

    def gradients(self) -> Dict[str, torch.Tensor]:
        """Of x and of each parameter, by name: ``main_grad`` where the gradient went there, ``grad`` otherwise. Not copies."""
        found = {"x": self.x.grad}
        for name, parameter in self.block.named_parameters():
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            found[name] = parameter.main_grad if fused else parameter.grad
        missing = [name for name, gradient in found.items() if gradient is None]
        if missing:
            raise RuntimeError(f"no gradient for {', '.join(missing)}")
        return found


def relative_difference(found: torch.Tensor, expected: torch.Tensor, chunk: int = 1 << 26) -> float:
    """|found - expected| / |expected| (2-norms), summed in float64 in pieces. What is not finite counts as 1e9."""
    found, expected = found.detach().reshape(-1), expected.detach().reshape(-1)
    difference = total = 0.0
    for start in range(0, expected.numel(), chunk):
        b = expected[start : start + chunk].to(found.device).double()
        difference += (found[start : start + chunk].double() - b).square().sum().item()
        total += b.square().sum().item()
    ratio = (difference / max(total, 1e-300)) ** 0.5
    return min(ratio, 1e9) if ratio == ratio else 1e9


def worst_difference(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> Tuple[float, str]:
    """The largest relative difference and whose it is."""
    return max((relative_difference(found[name], expected[name]), name) for name in expected)
