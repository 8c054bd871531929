"""Lets Megatron train with no GPU: for trying things out and for tests.

Megatron asks for CUDA by name in many places. :func:`install` gives these names a meaning on a CPU before Megatron is imported; gloo stands in
for nccl. :func:`prepare_args` switches off what only a GPU has. Random numbers of "the GPU" come from the CPU's default generator; what draws
from the CPU's on a GPU machine while training, the data loaders, draws from a generator of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
import torch.utils.data.dataloader as data_loading
from torch.overrides import TorchFunctionMode

from .errors import ConfigError

_MEMORY_BYTES = 24 << 30


class _Properties:
    """What torch.cuda.get_device_properties says. Compute capability 8.0 passes Megatron's checks for bfloat16."""

    name, major, minor = "cpu", 8, 0
    total_memory, multi_processor_count = _MEMORY_BYTES, 1


class _Stream:
    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = 0.0

    def record(self, *args: Any) -> None:
        self._time_s = time.perf_counter()

    def elapsed_time(self, other: "_Event") -> float:
        return (other._time_s - self._time_s) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None:
        pass

    synchronize = wait


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _itself(thing: Any, *args: Any, **kwargs: Any) -> Any:
    return thing


def _no_compile(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return function if function is not None else (lambda decorated: decorated)


_tensor_type = torch.Tensor.type


def _type_as_on_a_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Gradient clipping compares the type's name with torch.cuda's."""
    found = _tensor_type(self, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and "cuda" not in found else found


# What each name means on a CPU: (object, name, replacement).
_NAMES: Tuple[Tuple[Any, str, Any], ...] = (
    # There is one device, and it is there.
    (torch.cuda, "is_available", _constant(True)),
    (torch.cuda, "current_device", _constant("cpu")),
    (torch.cuda, "device_count", _constant(1)),
    (torch.cuda, "set_device", _nothing),
    (torch.cuda, "get_device_properties", _constant(_Properties)),
    (torch.cuda, "get_device_capability", _constant((8, 0))),
    (torch.cuda, "get_device_name", _constant("cpu")),
    (torch.accelerator, "is_available", _constant(False)),
    # Work is done when it has been asked for.
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _Event),
    (torch.cuda, "current_stream", lambda *args: _Stream()),
    (torch.cuda, "default_stream", lambda *args: _Stream()),
    (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    (torch.cuda, "is_current_stream_capturing", _constant(False)),
    # Memory statistics have nothing to say.
    (torch.cuda, "empty_cache", _nothing),
    (torch.cuda, "reset_peak_memory_stats", _nothing),
    (torch.cuda, "memory_stats", lambda *args: defaultdict(int)),
    *((torch.cuda, name, _constant(0)) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")),
    *((torch.cuda, name, _constant(0)) for name in ("temperature", "power_draw", "utilization", "clock_rate", "memory_usage")),
    (torch.cuda, "mem_get_info", _constant((_MEMORY_BYTES, _MEMORY_BYTES))),
    # Random numbers: the CPU's generator.
    (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
    (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
    (torch.cuda.random, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
    # Tensors are where they should be.
    (torch.Tensor, "cuda", _itself),
    (torch.Tensor, "pin_memory", _itself),
    (torch.nn.Module, "cuda", _itself),
    (torch.Tensor, "type", _type_as_on_a_gpu),
    (torch.cuda, "FloatTensor", torch.FloatTensor),
    (torch.cuda, "IntTensor", torch.IntTensor),
    (torch.cuda, "LongTensor", torch.LongTensor),
    # Compiling costs more than it saves here.
    (torch, "compile", _no_compile),
)


class _OnCpu(TorchFunctionMode):
    """device="cuda" means the CPU, and there is nothing to pin memory for."""

    def __torch_function__(self, function: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if any(isinstance(arg, (str, torch.device)) and str(arg).startswith("cuda") for arg in args):
            args = tuple("cpu" if isinstance(arg, (str, torch.device)) and str(arg).startswith("cuda") else arg for arg in args)
        return function(*args, **kwargs)


_installed: List[Callable[[], None]] = []


def active() -> bool:
    """Whether :func:`install` is in force."""
    return bool(_installed)


def install() -> None:
    """Gives CUDA's names a meaning on this CPU. Before Megatron is imported; calling it again does nothing.

    Raises ConfigError when Megatron has been imported already: it may have asked for CUDA.
    """
    if active():
        return
    if "megatron.core" in sys.modules:
        raise ConfigError("--memo-cpu: Megatron has been imported before megatron_memo.cpu.install(). Call install() first.")
    # Tensor parallelism asserts it; a CPU has no queues to order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for owner, name, replacement in _NAMES:
        _replace(owner, name, replacement)
    original = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        backend = "gloo" if backend is None or "nccl" in str(backend) else backend
        return original(backend, *args, **kwargs)

    _replace(dist, "init_process_group", init_process_group)
    mode = _OnCpu()
    mode.__enter__()
    _installed.append(lambda: mode.__exit__(None, None, None))
    _replace(data_loading._BaseDataLoaderIter, "__init__", _own_numbers(data_loading._BaseDataLoaderIter.__init__))
    _adjust_megatron()


def _own_numbers(original: Callable[..., None]) -> Callable[..., None]:
    """A data loader draws a seed when it starts. From the device's numbers that would make a resumed run, which starts its loaders anew,
    drop other activations than the run that was not stopped."""
    generator = torch.Generator()

    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        own, loader.generator = loader.generator, loader.generator or generator
        try:
            original(self, loader, *args, **kwargs)
        finally:
            loader.generator = own

    return __init__


def uninstall() -> None:
    """CUDA's names mean CUDA again. For tests."""
    while _installed:
        _installed.pop()()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = owner.__dict__[name] if name in vars(owner) else getattr(owner, name)
    setattr(owner, name, replacement)
    _installed.append(lambda: setattr(owner, name, original))


def _adjust_megatron() -> None:
    """Three places where Megatron's own Python decides against a CPU."""
    import megatron.core.datasets.utils as datasets
    import megatron.core.tensor_parallel.random as random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    _replace(random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))
    # The wheel brings the dataset helpers built; the launcher builds them for a checkout.
    _replace(datasets, "compile_helpers", _nothing)
    original = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """torch's norms with sequence parallelism: all that is missing is the mark by which their gradients are reduced."""
        sharded, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sharded
        for parameter in norm.parameters():
            parameter.sequence_parallel = sharded
        return norm

    _replace(WrappedTorchNorm, "__new__", staticmethod(new))


# Megatron's namespace: what a CPU needs.
_ARGUMENTS: Dict[str, Any] = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "disable_jit_fuser": True,
    "async_tensor_model_parallel_allreduce": False,
    "distributed_backend": "gloo",
    "num_workers": 0,
}


def prepare_args(args: Any) -> List[str]:
    """Sets, on Megatron's parsed and not yet validated namespace, what a CPU needs. Returns "name=value" for all that it changed."""
    changed = []
    for name, value in _ARGUMENTS.items():
        if hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            changed.append(f"{name}={value}")
    return changed
