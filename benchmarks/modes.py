"""The ways to run a layer stack: stock Megatron's, and MEMO's. All modes use the same weights, one after the other in one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional

import torch

from harness import Stack, build_block, on_gpu

KINDS = ("keep-all", "full-recompute", "fine-grained", "memo")


@dataclass(frozen=True)
class Mode:
    """One way to run the stack. ``text`` is how it was asked for."""

    text: str
    kind: str
    attention: str
    tiles: int = 1
    alpha: float = 1.0
    keep_layers: int = 1
    keep: float = 0.0


def parse_mode(text: str, attention: str) -> Mode:
    """``keep-all``, ``full-recompute``, ``fine-grained`` or ``memo:TILES:ALPHA:KEEP_LAYERS[:KEEP]``, with ``@te`` or ``@fa4`` for another attention.

    Raises ValueError, naming what it could not read.
    """
    name, _, own = text.partition("@")
    kind, *numbers = name.split(":")
    attention = own or attention
    if kind not in KINDS or attention not in ("te", "fa4") or (kind == "memo") != (len(numbers) in (3, 4)) or (kind != "memo" and numbers):
        raise ValueError(f"mode {text!r}: expected keep-all, full-recompute, fine-grained or memo:TILES:ALPHA:KEEP_LAYERS[:KEEP], then @te or @fa4")
    if kind != "memo":
        return Mode(f"{name}@{attention}", kind, attention)
    tiles, alpha, keep_layers, keep = *numbers, *["0"][len(numbers) - 3 :]
    return Mode(f"{name}@{attention}", kind, attention, int(tiles), float(alpha), int(keep_layers), float(keep))


def attach_memo(stack: Stack, mode: Mode, **options: Any):
    """The one place that calls megatron_memo: attaches it to the layers of ``stack`` and returns its session. ``options`` go to ``attach``."""
    from megatron_memo.config import MemoConfig
    from megatron_memo.hooks.attach import attach
    from megatron_memo.hooks.segments import read_call

    attention = "fa4" if mode.attention == "fa4" else "host"
    config = MemoConfig(
        enabled=True, alpha=mode.alpha, tiles=mode.tiles, keep=mode.keep, keep_layers=mode.keep_layers, attention=attention, cpu=not on_gpu()
    )
    attend = None
    if attention != "host":
        from megatron_memo.attention.backends import make_backend

        attend = make_backend(attention, scale=stack.shape.head_dim**-0.5)
    layers = list(stack.block.layers)
    x, call = read_call(layers[0], (), {"hidden_states": stack.x, "attention_mask": None, "rotary_pos_emb": stack.rope})
    return attach(layers, config, x, call, attend=attend, **options)


def fa4_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """FlashAttention-4 for stock layers, without megatron_memo: q, k, v [s, b, heads, d] -> [s, b, heads * d], causal."""
    from flash_attn.cute import flash_attn_func

    o = flash_attn_func(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), causal=True)
    o = o[0] if isinstance(o, tuple) else o
    return o.transpose(0, 1).reshape(q.shape[0], q.shape[1], -1)


@contextlib.contextmanager
def stock_attention(layers: List[torch.nn.Module], attention: str) -> Iterator[None]:
    """Gives stock layers FlashAttention-4 for a while; ``te`` leaves them as they are."""
    cores = [layer.self_attention.core_attention for layer in layers] if attention == "fa4" else []
    for core in cores:
        core.forward = fa4_attention
    try:
        yield
    finally:
        for core in cores:
            del core.forward


@contextlib.contextmanager
def full_recompute(config: Any) -> Iterator[None]:
    """Megatron's own full recomputation, one layer at a time, while it lasts."""
    wanted = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def share_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Makes ``target`` use the very parameters of ``source`` (same structure)."""
    modules = dict(source.named_modules())
    for name, module in target.named_modules():
        for key, parameter in modules[name]._parameters.items():
            module._parameters[key] = parameter


FINE_GRAINED_MODULES = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


class Running:
    """A stack in one mode: :meth:`step`, then :attr:`session` (memo's, or None)."""

    def __init__(self, stack: Stack, mode: Mode, session=None, other_block: Optional[torch.nn.Module] = None) -> None:
        self.stack, self.mode, self.session, self._other = stack, mode, session, other_block

    def step(self) -> None:
        if self._other is not None:
            self._fine_grained_step()
            return
        self.stack.step()
        if self.session is not None:
            self.session.end_step()

    def _fine_grained_step(self) -> None:
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface as Offload

        Offload.init_chunk_handler(0, None, None, 1 << 20, 0, self._other.config.activation_offload_fraction)
        for parameter in self._other.parameters():
            Offload.mark_not_offload(parameter)
        self.stack.step(self._other)
        Offload.reset()


@contextlib.contextmanager
def running(stack: Stack, mode: Mode) -> Iterator[Running]:
    """Puts ``stack`` into ``mode``; afterwards it is stock, keep-all, again. All modes use the same weights."""
    with contextlib.ExitStack() as undo:
        if mode.kind == "memo":
            session = attach_memo(stack, mode)
            undo.callback(session.detach)
            yield Running(stack, mode, session)
            return
        block = None
        if mode.kind == "fine-grained":
            block = build_block(stack.shape, fine_grained_activation_offloading=True, offload_modules=FINE_GRAINED_MODULES)
            share_parameters(stack.block, block)
        if mode.kind == "full-recompute":
            undo.enter_context(full_recompute(stack.block.config))
        undo.enter_context(stock_attention((block or stack.block).layers, mode.attention))
        yield Running(stack, mode, other_block=block)
