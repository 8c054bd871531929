"""Puts tiled layers in the place of Megatron's, measures what they send to the host, and takes exactly that much host memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..config import MemoConfig
from ..errors import UnsupportedError
from ..policy.tiles import LayerPolicy
from ..swap.executor import Executor
from ..swap.host_memory import Budget, HostMemoryRanOut, budget_bytes, local_ranks, read_limits, shortage_error
from ..swap.pinned import PinnedBuffer
from ..swap.simulator import SimulatedStreams
from ..swap.slab import HostSlab
from ..swap.streams import CudaStreams, Streams
from ..tiles.layer import TiledLayer, run
from ..tiles.layer_pass import Chain, PassBytes
from . import random_state
from .segments import Attend, LayerCall, MegatronSegments, read_call

# Smaller storages are not worth a copy on a GPU. On a CPU everything is swapped, so that small models show every path.
_CUDA_MIN_BYTES = 1 << 16
# Device memory, in layer inputs, that may wait for its copies out: below what attention's backward pass needs anyway.
_LEAVING_LIMIT_INPUTS = 8


@dataclass(frozen=True)
class Measured:
    """Bytes of one forward pass of one layer under the run's policy, and the host block that it needs."""

    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    io_bytes: int
    block_bytes: int

    def block_bytes_at(self, alpha: float) -> float:
        """What a pass would send with another fraction of swapped tokens."""
        rest = self.kept_bytes + self.swapped_bytes + self.recomputed_bytes - self.io_bytes
        return self.io_bytes + alpha * rest


class Session:
    """Tiled layers of one model on one rank. Made by :func:`attach`; :meth:`detach` restores Megatron's own."""

    def __init__(self, config: MemoConfig, layers: Sequence[Any], tiled: List[TiledLayer], measured: List[Measured], buffer: PinnedBuffer, slab: HostSlab):
        self.config, self.layers, self.tiled, self.measured = config, list(layers), tiled, measured
        self._buffer, self._slab = buffer, slab
        self._steps: List[Dict[str, Any]] = []
        for layer, tile in zip(self.layers, tiled):
            layer.forward = _TiledForward(layer, tile)

    def detach(self) -> None:
        """Megatron's own layers again; the host memory is returned. Calling it twice does nothing."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers, self.tiled = [], []
        if self._slab.used_bytes == 0:
            self._buffer.close()
        # Else forward passes wait for their backward passes: their blocks hold the memory, and it goes with the last of them.

    def end_step(self, **facts: Any) -> None:
        """Call after each training step. ``facts`` (such as iteration, loss, time_ms) go into the report's list of steps."""
        if facts:
            self._steps.append(facts)
        if self.tiled:
            self.stall_ms = self.tiled[0].executor.stall_ms()

    stall_ms: float = 0.0

    def report(self) -> Dict[str, Any]:
        """What was kept, swapped and recomputed in a forward pass of each layer, and the host memory used; JSON-ready."""
        layers = [{"kept_bytes": m.kept_bytes, "swapped_bytes": m.swapped_bytes, "recomputed_bytes": m.recomputed_bytes} for m in self.measured]
        totals = {key: sum(layer[key] for layer in layers) for key in ("kept_bytes", "swapped_bytes", "recomputed_bytes")}
        return {
            "policy": {k: v for k, v in asdict(self.config).items() if k in ("alpha", "keep", "tiles", "keep_layers", "attention")},
            **totals,
            "layers": layers,
            "host_slab_bytes": self._slab.memory.numel(),
            "host_peak_bytes": self._slab.peak_bytes,
            "stall_ms": round(self.stall_ms, 3),
            "steps": self._steps,
        }


class _TiledForward:
    """Stands as a layer's ``forward``. It belongs to that one layer: a copy of the model would otherwise run the original's parameters."""

    def __init__(self, layer: Any, tile: TiledLayer) -> None:
        self._layer, self._tile = layer, tile

    def __call__(self, *args: Any, **kwargs: Any) -> Tuple[Tensor, None]:
        x, call = read_call(self._layer, args, kwargs)
        return run(self._tile, x, call), None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "--memo: a model with tiled layers cannot be copied or pickled: the copy's layers would run the original's parameters. "
            "Detach first (Session.detach(), or uninstall() of what enable() returned)."
        )


def policy_of(config: MemoConfig, index: int, count: int) -> LayerPolicy:
    """The policy of the ``index``-th of ``count`` layers."""
    return LayerPolicy(config.alpha, config.keep, config.tiles, resident=index >= count - config.keep_layers)


def measure(tile: TiledLayer, x: Tensor, call: LayerCall) -> Measured:
    """One forward pass of the layer on ``x`` [s, b, h] in which nothing is copied and every saved byte is counted. Leaves random states as they were."""
    counting = TiledLayer(tile.segments, tile.policy, Executor(SimulatedStreams(), None), Chain(), min_bytes=tile.min_bytes)
    with torch.enable_grad(), random_state.preserved():
        y = run(counting, x.detach().requires_grad_(), call)
    state = y.grad_fn.state
    counted: PassBytes = state.bytes
    io_bytes = state.input.group.size_bytes + state.attention.group.size_bytes
    return Measured(counted.kept_bytes, counted.swapped_bytes, counted.recomputed_bytes, io_bytes, counted.swapped_bytes)


def signature(layer: Any) -> Tuple[Any, ...]:
    """What makes two layers alike: their modules and the shapes and types of their parameters."""
    modules = tuple((name, type(module).__qualname__) for name, module in layer.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters


def attach(
    layers: Sequence[Any],
    config: MemoConfig,
    x: Tensor,
    call: LayerCall,
    *,
    attend: Optional[Attend] = None,
    streams: Optional[Streams] = None,
    passes_in_flight: int = 1,
) -> Session:
    """Replaces the forward passes of ``layers`` (one model chunk, in order).

    Args:
        x: an input of the first layer as in training, [s, b, h]; only its shape, type and device matter.
        call: the other arguments of a training call.
        attend: another core attention, or None for Megatron's.
        streams: the device's queues; None makes them.
        passes_in_flight: forward passes of a layer that may wait for their backward passes at once.

    Raises:
        HostMemoryError: what the policy swaps does not fit the host memory of this rank. Nothing has been replaced.
    """
    taken = [layer for layer in layers if "forward" in layer.__dict__]
    if taken:
        raise UnsupportedError(
            f"--memo: {len(taken)} of {len(layers)} layers have a forward of their own already (tiled by an earlier attach(), or patched by somebody else); "
            "it would be dropped. Detach or undo that first."
        )
    streams = streams if streams is not None else CudaStreams(x.device) if x.is_cuda else SimulatedStreams()
    min_bytes = _CUDA_MIN_BYTES if x.is_cuda else 1
    several = len(policy_of(config, 0, len(layers)).cut(x.shape[0])) > 1
    limit = _LEAVING_LIMIT_INPUTS * x.numel() * x.element_size() if several else None
    chain = Chain()
    tiled: List[TiledLayer] = []
    measured: List[Measured] = []
    known: Dict[Any, Measured] = {}
    for index, layer in enumerate(layers):
        policy = policy_of(config, index, len(layers))
        tile = TiledLayer(MegatronSegments(layer, attend), policy, None, chain, first=index == 0, min_bytes=min_bytes)
        kind = (signature(layer), policy.resident)
        if kind not in known:
            known[kind] = measure(tile, x, call)
        tile.block_bytes = known[kind].block_bytes
        tiled.append(tile)
        measured.append(known[kind])
    needed = passes_in_flight * sum(m.block_bytes for m in measured)
    buffer = _host_buffer(needed, config, measured, x)
    slab = HostSlab(buffer.tensor)
    executor = Executor(streams, slab, limit)
    for tile in tiled:
        tile.executor = executor
    return Session(config, layers, tiled, measured, buffer, slab)


def _host_buffer(needed_bytes: int, config: MemoConfig, measured: Sequence[Measured], x: Tensor) -> PinnedBuffer:
    """Exactly the host memory that the passes need, or an error that says which alpha would fit."""
    budget = budget_bytes(read_limits(), local_ranks(), config.host_gib)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # ranks share what the node has left: all read it before any takes some
    if budget.size_bytes is None or needed_bytes <= budget.size_bytes:
        try:
            return PinnedBuffer(needed_bytes, pin=x.is_cuda, device_index=x.device.index if x.is_cuda else None)
        except HostMemoryRanOut as error:
            budget = Budget(error.there_bytes, f"taken until memory ran out: {error}", local_ranks())
    raise shortage_error(needed_bytes, budget, _alpha_that_fits(budget.size_bytes, measured, config))


def _alpha_that_fits(budget_bytes_: int, measured: Sequence[Measured], config: MemoConfig) -> Optional[float]:
    """The largest fraction of swapped tokens, in hundredths, that fits; None when not even 0 does."""
    sending = [m for m in measured if m.block_bytes]
    for hundredths in range(int(config.alpha * 100), -1, -1):
        if sum(m.block_bytes_at(hundredths / 100) for m in sending) <= budget_bytes_:
            return hundredths / 100
    return None
