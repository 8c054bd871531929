"""Before the first step: the very layer of this run, stock against tiled, forward and backward.

The tiled layer repeats what two upstream functions do around core attention. Another Megatron version, a fork or an option that nobody
thought of may do something else there; on a small input this shows before anything is trained.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..errors import SelfCheckError
from ..policy.tiles import Action, LayerPolicy, Tile
from ..swap.executor import Executor
from ..swap.simulator import SimulatedStreams
from ..swap.slab import HostSlab
from ..swap.streams import CudaStreams
from ..tiles.layer import TiledLayer, run
from ..tiles.layer_pass import Chain
from . import random_state as rng
from .attach import measure
from .segments import Attend, LayerCall, MegatronSegments

# A relative distance (norm of the difference over the norm of stock's) that tiles of another height may cause: GEMMs of other shapes round
# elsewhere. A wrong layer is off by a hundred times that or more.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}

_ONE_TILE = LayerPolicy(alpha=1.0, keep=0.0, tiles=1)
_MIXED = LayerPolicy(alpha=0.4, keep=0.3, tiles=4)


@dataclass(frozen=True)
class _AllKept(LayerPolicy):
    """The same tiles, all kept."""

    def cut(self, rows: int) -> Tuple[Tile, ...]:
        return tuple(replace(tile, action=Action.KEEP) for tile in super().cut(rows))


_MIXED_KEPT = _AllKept(_MIXED.alpha, _MIXED.keep, _MIXED.tiles)


class Difference(NamedTuple):
    """The tensor that fills most of what it may differ by: norm of the difference over stock's norm, and how much is allowed."""

    tensor: str
    relative: float
    allowed: float


def self_check(layer: Any, x: Tensor, call: LayerCall, attend: Optional[Attend] = None) -> List[Tuple[str, Difference]]:
    """Compares the tiled layer with the stock one on ``x`` [s, b, h]; returns the largest difference of each policy.

    Parameters, gradients, ``main_grad``, TransformerEngine's flags and all RNG states are afterwards as they were.
    Collective over the tensor-parallel group.

    Raises:
        SelfCheckError: naming the tensor that differs most, by how much, and how much is allowed. With one tile nothing may differ on a
            CPU, and hardly anything on a GPU.
    """
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    # One rounding more or less in the input: what that does to a tensor, another order of sums may do too. A gradient that is zero but for
    # rounding (a bias of k, which softmax ignores) differs by all of itself.
    ulp = torch.finfo(x.dtype).eps * torch.randint(-1, 2, x.shape, generator=generator).to(x)
    found: List[Tuple[str, Difference]] = []

    def stock(x: Tensor = x) -> Dict[str, Tensor]:
        return _run_stock(layer, x, dy, call)

    def tiled(policy: LayerPolicy) -> Dict[str, Tensor]:
        return _run_tiled(layer, x, dy, call, policy, attend)

    def compare(name: str, expected: _Run, tiles: _Run, allowed: Callable[[str], float]) -> None:
        found.append((name, _require(layer, name, expected, tiles, allowed)))

    with _left_as_it_was(layer), _core_attention(layer, attend):
        expected = _run(stock)
        again = _distances(expected, _run(stock))
        compare("one tile", expected, _run(lambda: tiled(_ONE_TILE)), lambda tensor: _allowed_for_one_tile(x, again, tensor))
        if _drops(layer):
            # Several tiles draw other numbers than the whole: the same tiles, all kept, say what is right.
            kept, mixed = _run(lambda: tiled(_MIXED_KEPT)), _run(lambda: tiled(_MIXED))
            compare("dropout, four tiles, mixed against kept", kept, mixed, lambda tensor: _allowed_for_one_tile(x, again, tensor))
        with _no_dropout(layer):
            expected = _run(stock)
            rounding = _distances(expected, _run(lambda: stock(x * (1 + ulp))))
            compare(
                "four tiles, mixed",
                expected,
                _run(lambda: tiled(_MIXED)),
                lambda tensor: max(_tolerance(x, expected.tensors[tensor]), 8 * rounding[tensor], 4 * again[tensor]),
            )
    return found


class _Run(NamedTuple):
    """The tensors of a forward and backward pass, and the states of the random number generators after it."""

    tensors: Dict[str, Tensor]
    random: rng.RandomState


def _run(work: Callable[[], Dict[str, Tensor]]) -> _Run:
    """Each run draws the same numbers."""
    with rng.preserved():
        return _Run(work(), rng.current())


def _require(layer: Any, name: str, expected: _Run, found: _Run, allowed: Callable[[str], float]) -> Difference:
    distances = _distances(expected, found)
    worst = max(distances, key=lambda tensor: _excess(distances[tensor], allowed(tensor)))
    upstream = f"what this Megatron's {type(layer).__qualname__} {layer.layer_number} computes"
    end = "Nothing has been trained. Train without --memo, and report Megatron's version and your flags."
    if not distances[worst] <= allowed(worst):
        raise SelfCheckError(
            f"the tiled layer ({name}) does not compute {upstream}: {worst} differs by {distances[worst]:.2e} (norm of the difference over "
            f"stock's norm), allowed {allowed(worst):.2e}. {end}"
        )
    if not expected.random.equals(found.random):
        raise SelfCheckError(f"the tiled layer ({name}) does not compute {upstream}: it leaves random number generators in other states. {end}")
    return Difference(worst, distances[worst], allowed(worst))


def _drops(layer: Any) -> bool:
    return layer.training and (layer.hidden_dropout > 0 or layer.config.attention_dropout > 0)


@contextmanager
def _no_dropout(layer: Any) -> Iterator[None]:
    training = [(module, module.training) for module in layer.modules()]
    if _drops(layer):
        layer.eval()
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag


def _run_stock(layer: Any, x: Tensor, dy: Tensor, call: LayerCall) -> Dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y, _ = type(layer).forward(layer, hidden_states=x, attention_mask=call.attention_mask, rotary_pos_emb=call.rope)
    return _gradients(layer, x, y, dy)


def _run_tiled(layer: Any, x: Tensor, dy: Tensor, call: LayerCall, policy: LayerPolicy, attend: Optional[Attend]) -> Dict[str, Tensor]:
    tile = TiledLayer(MegatronSegments(layer, attend), policy, None, Chain(), min_bytes=1)
    tile.block_bytes = measure(tile, x, call).swapped_bytes
    memory = torch.empty(tile.block_bytes, dtype=torch.uint8, pin_memory=x.is_cuda)
    tile.executor = Executor(CudaStreams(x.device) if x.is_cuda else SimulatedStreams(), HostSlab(memory))
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = run(tile, x, call)
    return _gradients(layer, x, y, dy)


def _gradients(layer: Any, x: Tensor, y: Tensor, dy: Tensor) -> Dict[str, Tensor]:
    """y, dx and every parameter's gradient, from wherever the kernels put it. No accumulation hook fires."""
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False
    dx, *of_parameters = torch.autograd.grad(y, [x, *parameters.values()], dy, allow_unused=True)
    found = {"the output": y.detach(), "the input's gradient": dx}
    for (name, parameter), gradient in zip(parameters.items(), of_parameters):
        if getattr(parameter, "grad_added_to_main_grad", False) or gradient is None:
            gradient = getattr(parameter, "main_grad", None)
        found[f"the gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return found


def _distances(stock: _Run, other: _Run) -> Dict[str, float]:
    """For each tensor the norm of the difference over stock's norm; not a number counts as infinite."""
    found = {}
    for name, expected in stock.tensors.items():
        scale = expected.double().norm().item()
        distance = (other.tensors[name].double() - expected.double()).norm().item() / (scale if scale > 0 else 1.0)
        found[name] = distance if distance == distance else float("inf")
    return found


def _allowed_for_one_tile(x: Tensor, again: Dict[str, float], tensor: str) -> float:
    """Nothing, where stock repeats itself to the bit on a CPU. On a GPU kernels may be chosen by strides and sum in no fixed order."""
    if any(again.values()):
        return max(_TOLERANCE[x.dtype], 4 * again[tensor])
    return 2 * torch.finfo(x.dtype).eps if x.is_cuda else 0.0


def _tolerance(x: Tensor, tensor: Tensor) -> float:
    """By the coarser of the two types: a float64 layer may have float32 main gradients."""
    return max(_TOLERANCE[x.dtype], _TOLERANCE.get(tensor.dtype, 0.0))


def _excess(distance: float, allowed: float) -> float:
    """How far ``distance`` fills what is allowed."""
    if distance == 0.0:
        return 0.0
    return distance / allowed if allowed > 0 else float("inf")


@contextmanager
def _core_attention(layer: Any, attend: Optional[Attend]) -> Iterator[None]:
    """Stock with the same attention kernel, so that what is compared is the layer."""
    if attend is None:
        yield
        return
    core = layer.self_attention.core_attention
    core.forward = lambda q, k, v, *args, **kwargs: attend(q, k, v)
    try:
        yield
    finally:
        core.__dict__.pop("forward")


@contextmanager
def _left_as_it_was(layer: Any) -> Iterator[None]:
    """Gradients, flags and RNG states after the block as before it."""
    parameters = list(layer.parameters())
    main_grads = [p.main_grad.clone() if getattr(p, "main_grad", None) is not None else None for p in parameters]
    added = [getattr(p, "grad_added_to_main_grad", None) for p in parameters]
    flags = [(m, m.is_first_microbatch) for m in layer.modules() if hasattr(m, "is_first_microbatch")]
    try:
        with rng.preserved():
            yield
    finally:
        for parameter, main_grad, flag in zip(parameters, main_grads, added):
            if main_grad is not None:
                parameter.main_grad.copy_(main_grad)
            if flag is not None:
                parameter.grad_added_to_main_grad = flag
        for module, flag in flags:
            module.is_first_microbatch = flag
