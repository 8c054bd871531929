"""What Megatron's own model hands to its first layer, without running the layers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Sequence, Tuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, TransformerLayer
from torch import Tensor

from ..errors import UnsupportedError
from .random_state import preserved
from .segments import LayerCall, read_call


def unwrapped(chunk: Any) -> Any:
    """The model inside Megatron's wrappers for data parallelism and 16-bit parameters."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


@contextmanager
def unsynchronised(chunks: Sequence[Any]) -> Iterator[None]:
    """Within it no module waits for, or starts, a gather of data-parallel parameters: they are whole when training is set up, and the gathers
    of the first step must find everything as Megatron has left it."""
    hooked = [chunk for chunk in chunks if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def layers_of(model: Any) -> List[Any]:
    """The transformer layers of a GPTModel, in order. Raises UnsupportedError for any other model or kind of layer."""
    if type(model) is not GPTModel:
        raise UnsupportedError(f"--memo supports megatron.core's GPTModel; found {type(model).__qualname__}. Train it without --memo.")
    layers = list(model.decoder.layers)
    others = {type(m).__qualname__ for m in model.modules() if isinstance(m, BaseTransformerLayer) and m not in layers}
    others |= {type(layer).__qualname__ for layer in layers if type(layer) is not TransformerLayer}
    if others:
        raise UnsupportedError(
            f"--memo supports megatron.core's TransformerLayer; this model also has layers of type {', '.join(sorted(others))}. "
            "Take a plain GPT layer spec (no MoE, MLA, MTP or hybrid layers), or train without --memo."
        )
    if not layers:
        raise UnsupportedError("--memo: this rank's part of the model has no transformer layers. Give every rank at least one, or train without --memo.")
    return layers


class _Captured(Exception):
    def __init__(self, x: Tensor, call: LayerCall) -> None:
        self.x, self.call = x, call


def first_call(model: Any, tokens: int, micro_batch: int, device: torch.device) -> Tuple[Tensor, LayerCall]:
    """The input [s, b, h] and the other arguments of the first layer, for sequences of ``tokens`` tokens.

    The model embeds token 0 throughout, and a later pipeline stage receives zeros; its first layer is reached and nothing after it runs; random
    states stay as they were. Collective over the tensor-parallel group.
    """
    layers = layers_of(model)

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Captured(*read_call(layers[0], args, kwargs))

    ids = torch.zeros(micro_batch, tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device).unsqueeze(0).expand_as(ids)
    earlier = layers[0].__dict__.get("forward")
    layers[0].forward = stop
    if not model.pre_process:
        model.set_input_tensor(_received(model.config, tokens, micro_batch, device))
    try:
        with torch.no_grad(), preserved():
            model(ids, positions, None)
    except _Captured as captured:
        return captured.x.detach(), captured.call
    finally:
        if not model.pre_process:
            model.set_input_tensor(None)
        layers[0].__dict__.pop("forward")
        if earlier is not None:
            layers[0].forward = earlier
    raise RuntimeError(f"{type(model).__qualname__} ran without calling its first transformer layer")


def _received(config: Any, tokens: int, micro_batch: int, device: torch.device) -> Tensor:
    """What a later stage gets from the one before it, [s, b, h], as zeros."""
    rows = tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    return torch.zeros(rows, micro_batch, config.hidden_size, dtype=config.pipeline_dtype or config.params_dtype, device=device)
