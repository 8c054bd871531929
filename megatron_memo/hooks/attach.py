"""Puts tiled layers in the place of Megatron's, measures what they send to the host, and takes exactly that much host memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..config import MemoConfig
from ..errors import UnsupportedError
from ..policy.tiles import LayerPolicy
from ..swap.executor import Executor
from ..swap.pinned import PinnedBuffer
from ..swap.schedule import Schedule
from ..swap.simulator import SimulatedStreams
from ..swap.slab import HostSlab
from ..swap.streams import CudaStreams, Streams
from ..tiles.layer import TiledLayer, run
from ..tiles.layer_pass import Chain, PassBytes
from . import random_state
from .host_share import Measured, host_buffer
from .segments import Attend, LayerCall, MegatronSegments, read_call, rotates

# Smaller storages are not worth a copy on a GPU. On a CPU everything is swapped, so that small models show every path.
_CUDA_MIN_BYTES = 1 << 16
# Device memory, in layer inputs, that may wait for its copies out: below what attention's backward pass needs anyway.
_LEAVING_LIMIT_INPUTS = 8


class Chunk(NamedTuple):
    """One model chunk of this rank, as it trains.

    Attributes:
        layers: its transformer layers, in order.
        x: an input of the first one, [s, b, h]; only its shape, type and device matter.
        call: the other arguments of a training call.
        received: the input comes from another pipeline stage.
        last: the model's last chunk, whose backward pass begins right after its forward pass.
    """

    layers: Sequence[Any]
    x: Tensor
    call: LayerCall
    received: bool = False
    last: bool = True


class Session:
    """Tiled layers of all model chunks of one rank. Made by :func:`attach_chunks`; :meth:`detach` restores Megatron's own."""

    def __init__(
        self,
        config: MemoConfig,
        layers: Sequence[Any],
        tiled: List[TiledLayer],
        measured: List[Measured],
        schedule: Schedule,
        buffer: PinnedBuffer,
        slab: HostSlab,
    ):
        self.config, self.layers, self.tiled, self.measured, self.schedule = config, list(layers), tiled, measured, schedule
        self.numbers = [layer.layer_number for layer in layers]
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
        layers = [
            {"layer": number, "kept_bytes": m.kept_bytes, "swapped_bytes": m.swapped_bytes, "recomputed_bytes": m.recomputed_bytes}
            for number, m in zip(self.numbers, self.measured)
        ]
        totals = {key: sum(layer[key] for layer in layers) for key in ("kept_bytes", "swapped_bytes", "recomputed_bytes")}
        return {
            "policy": {k: v for k, v in asdict(self.config).items() if k in ("alpha", "keep", "tiles", "keep_layers", "attention")},
            **totals,
            "layers": layers,
            "passes_in_flight": self.schedule.in_flight(),
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


def policy_of(config: MemoConfig, index: int, count: int, last: bool = True) -> LayerPolicy:
    """The policy of the ``index``-th of ``count`` layers of a chunk. Only in the model's ``last`` chunk are layers resident: elsewhere every pass
    in flight would keep them."""
    return LayerPolicy(config.alpha, config.keep, config.tiles, resident=last and index >= count - config.keep_layers)


def measure(tile: TiledLayer, x: Tensor, call: LayerCall) -> Measured:
    """One forward pass of the layer on ``x`` [s, b, h] in which nothing is copied and every saved byte is counted. Leaves random states as they were."""
    counting = TiledLayer(tile.segments, tile.policy, Executor(SimulatedStreams(), None), Chain(), received=tile.received, min_bytes=tile.min_bytes)
    with torch.enable_grad(), random_state.preserved():
        y = run(counting, x.detach().requires_grad_(), call)
    state = y.grad_fn.state
    counted: PassBytes = state.bytes
    input_bytes, attention_bytes = state.input.group.size_bytes, state.attention.group.size_bytes
    rest_bytes = counted.kept_bytes + counted.swapped_bytes + counted.recomputed_bytes - input_bytes - attention_bytes
    io_bytes = attention_bytes + (0 if tile.received else input_bytes)
    return Measured(counted.kept_bytes, counted.swapped_bytes, counted.recomputed_bytes, io_bytes, rest_bytes)


def signature(layer: Any) -> Tuple[Any, ...]:
    """What makes two layers alike: their modules, the shapes and types of their parameters, whether they rotate q and k, and how they exchange
    what context parallelism has cut."""
    modules = tuple((name, type(module).__qualname__) for name, module in layer.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters, rotates(layer), getattr(layer.self_attention.core_attention, "cp_comm_type", None)


def attach(layers: Sequence[Any], config: MemoConfig, x: Tensor, call: LayerCall, **options: Any) -> Session:
    """:func:`attach_chunks` for the layers of a whole model, in order; ``x`` and ``call`` as in :class:`Chunk`."""
    return attach_chunks([Chunk(layers, x, call)], config, **options)


def attach_chunks(
    chunks: Sequence[Chunk],
    config: MemoConfig,
    *,
    schedule: Schedule = Schedule(),
    attend: Optional[Attend] = None,
    streams: Optional[Streams] = None,
) -> Session:
    """Replaces the forward passes of the layers of all model chunks of this rank. Collective over all ranks.

    Args:
        chunks: in the order of the pipeline.
        schedule: the passes of a training step, which say how many wait for their backward passes at once.
        attend: another core attention, or None for Megatron's.
        streams: the device's queues; None makes them.

    Raises:
        HostMemoryError: what the policy swaps does not fit the host memory of this rank. Nothing has been replaced.
    """
    layers = [layer for chunk in chunks for layer in chunk.layers]
    taken = [layer for layer in layers if "forward" in layer.__dict__]
    if taken:
        raise UnsupportedError(
            f"--memo: {len(taken)} of {len(layers)} layers have a forward of their own already (tiled by an earlier attach(), or patched by somebody else); "
            "it would be dropped. Detach or undo that first."
        )
    x = chunks[0].x
    streams = streams if streams is not None else CudaStreams(x.device) if x.is_cuda else SimulatedStreams()
    min_bytes = _CUDA_MIN_BYTES if x.is_cuda else 1
    several = len(policy_of(config, 0, len(chunks[0].layers), chunks[0].last).cut(x.shape[0])) > 1
    limit = _LEAVING_LIMIT_INPUTS * x.numel() * x.element_size() if several else None
    tiled: List[TiledLayer] = []
    measured: List[List[Measured]] = []
    known: Dict[Any, Measured] = {}
    for chunk in chunks:
        chain = Chain()
        measured.append([])
        for index, layer in enumerate(chunk.layers):
            policy = policy_of(config, index, len(chunk.layers), chunk.last)
            first = index == 0
            tile = TiledLayer(MegatronSegments(layer, attend), policy, None, chain, first=first, received=first and chunk.received, min_bytes=min_bytes)
            kind = (signature(layer), policy.resident, tile.received)
            if kind not in known:
                known[kind] = measure(tile, chunk.x, chunk.call)
            tile.block_bytes = known[kind].swapped_bytes
            tiled.append(tile)
            measured[-1].append(known[kind])
    buffer = host_buffer(measured, schedule, config, x.device)
    slab = HostSlab(buffer.tensor)
    executor = Executor(streams, slab, limit)
    for tile in tiled:
        tile.executor = executor
    return Session(config, layers, tiled, [m for chunk in measured for m in chunk], schedule, buffer, slab)
