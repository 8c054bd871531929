"""Megatron's TransformerLayer as the three segments that run by tiles.

What stands here is what TransformerLayer._forward_attention and Attention.forward do in training, cut in two at core attention; the MLP
is the layer's own method. The allowlist and the self-check hold it to the installed Megatron.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, Dict, FrozenSet, List, Optional, Sequence, Tuple

from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.modules import module as global_hooks

from ..errors import UnsupportedError
from ..swap.executor import storage_key
from ..tiles.grid import Grid
from . import random_state as rng
from .gate import gated
from .graph_only import without_output
from .rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Arguments of a layer's forward that training may pass. Any other one that is not None asks for something that tiles do not do.
_KNOWN = ("hidden_states", "attention_mask", "rotary_pos_emb")


@dataclass(frozen=True)
class LayerCall:
    """What one forward call gives a layer besides its input.

    Attributes:
        attention_mask: as Megatron passes it, or None for a causal mask that the backend makes.
        rope: whole-sequence frequencies of q and k, or None.
    """

    attention_mask: Optional[Tensor]
    rope: Optional[Tuple[Tensor, Tensor]]
    shared: FrozenSet[int] = field(default=frozenset())


def read_call(layer: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> Tuple[Tensor, LayerCall]:
    """The layer's input [s, b, h] and the rest of a call. Raises UnsupportedError for arguments that tiles do not handle."""
    bound = inspect.signature(type(layer)._forward_attention).bind(layer, *args, **kwargs).arguments
    unknown = [name for name, value in bound.items() if name not in ("self", *_KNOWN) and value is not None and value != {}]
    if unknown:
        raise UnsupportedError(
            f"--memo: {type(layer).__name__}.forward was given {', '.join(unknown)}, which tiled layers do not handle (expected only "
            f"{', '.join(_KNOWN)}). Train without packed sequences, inference contexts, cross-attention and attention biases, or without --memo."
        )
    rope, mask = bound.get("rotary_pos_emb"), bound.get("attention_mask")
    if rope is not None and not isinstance(rope, tuple):
        rope = (rope, rope)
    if rope is not None and any(part is None or part.requires_grad for part in rope):
        raise UnsupportedError(
            "--memo: expected rotary frequencies for both q and k that need no gradient; found a part that is None or is trained. Train without --memo."
        )
    shared = [tensor for tensor in (mask, *(rope or ())) if tensor is not None]
    return bound["hidden_states"], LayerCall(mask, rope, frozenset(storage_key(tensor) for tensor in shared))


def _waits_for_parameters(hook: Callable[..., Any], module: Any) -> bool:
    """Whether ``hook`` is data parallelism's, which waits for the module's own parameters (--overlap-param-gather), and there are none."""
    of_data_parallelism = getattr(hook, "__module__", "").startswith("megatron.core.distributed.")
    return of_data_parallelism and next(module.parameters(recurse=False), None) is None


def rotates(layer: Any) -> bool:
    """Whether ``layer`` turns its q and k where the model has rotary positions: with --no-rope-freq some layers do not."""
    without = getattr(layer.config, "no_rope_freq", None)
    return not (without and without[layer.self_attention.layer_number - 1])


class MegatronSegments:
    """The :class:`~megatron_memo.tiles.layer_pass.Segments` of one TransformerLayer.

    Args:
        layer: megatron.core's TransformerLayer.
        attend: replaces the layer's own core attention: q, k, v [s, b, heads, d] to o [s, b, heads * d]; None keeps it.
    """

    def __init__(self, layer: Any, attend: Optional[Attend] = None) -> None:
        config = layer.config
        if attend is not None and config.attention_dropout > 0:
            raise UnsupportedError(
                f"--memo-attention: this kernel has no dropout, and --attention-dropout is {config.attention_dropout:g}. Set it to 0, or take "
                "--memo-attention host."
            )
        if getattr(config, "use_te_rng_tracker", False) and (config.hidden_dropout > 0 or config.attention_dropout > 0):
            raise UnsupportedError("--memo: dropout with TransformerEngine's random number tracker is not supported. Leave out --te-rng-tracker.")
        self._layer, self._attend = layer, attend
        self._gated = bool(getattr(config, "attention_output_gate", False))
        self.shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._untouched: FrozenSet[int] = frozenset()
        self._transformer_engine = [module for module in layer.modules() if hasattr(module, "is_first_microbatch")]
        self._fused_weights = [
            module.weight
            for module in layer.modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and getattr(module, "gradient_accumulation_fusion", False)
        ]
        # These come before core attention; what is left comes after it.
        attention = layer.self_attention
        before = [layer.input_layernorm, *(getattr(attention, n, None) for n in ("linear_qkv", "q_layernorm", "k_layernorm", "core_attention"))]
        self._before = {id(p) for module in before if module is not None for p in module.parameters()}

    @property
    def qkv_parameters(self) -> List[Tensor]:
        return [p for p in self._layer.parameters() if p.requires_grad and id(p) in self._before]

    @property
    def out_parameters(self) -> List[Tensor]:
        return [p for p in self._layer.parameters() if p.requires_grad and id(p) not in self._before]

    def begin(self) -> None:
        # TransformerEngine overwrites main_grad in the backward pass of what it takes for the first micro-batch. Of several tiles the
        # first one runs first forward and last backward, and would drop what all others have added.
        for module in self._transformer_engine:
            module.is_first_microbatch = False
        self._refuse_hooks()
        # Taken anew for every pass: data parallelism moves parameters into its own buffers.
        tensors: List[Tensor] = [*self._layer.buffers()]
        for parameter in self._layer.parameters():
            tensors += [parameter, *(t for t in (parameter.grad, getattr(parameter, "main_grad", None)) if isinstance(t, Tensor))]
        self._untouched = frozenset(storage_key(tensor) for tensor in tensors)

    def _refuse_hooks(self) -> None:
        """Raises UnsupportedError for hooks that tiles would run at the wrong time, too often, or never."""
        attention = self._layer.self_attention
        before = [hook for hook in attention._forward_pre_hooks.values() if not _waits_for_parameters(hook, attention)]
        if before or attention._forward_hooks or attention._backward_hooks or attention._backward_pre_hooks:
            raise UnsupportedError(
                f"--memo: layer {self._layer.layer_number}'s self_attention has module hooks. Tiled layers call its parts, not the module, so they would "
                "never run. Put them on the layer, its norms, linear_qkv, linear_proj or mlp, or train without --memo."
            )
        hooked = [name for name, parameter in self._layer.named_parameters() if parameter._backward_hooks]
        if hooked:
            raise UnsupportedError(
                f"--memo: {', '.join(hooked)} of layer {self._layer.layer_number} have gradient hooks (Tensor.register_hook). They would run once for each "
                "tile and again on the sum. Use register_post_accumulate_grad_hook, or train without --memo."
            )

    def untouched(self, call: LayerCall) -> FrozenSet[int]:
        return self._untouched | call.shared

    def qkv(self, x: Tensor, call: LayerCall, grid: Grid, start: int, stop: int) -> Sequence[Tensor]:
        layer, attention = self._layer, self._layer.self_attention
        normed = layer.input_layernorm(x)
        if isinstance(normed, tuple):
            raise UnsupportedError(
                "--memo: this layer's input norm returns (output, residual); tiled layers expect the output alone. "
                "Switch the fused residual norm off, or train without --memo."
            )
        gate = {"output_gate": True} if self._gated else {}
        q, k, *rest = attention.get_query_key_value_tensors(normed, None, **gate)
        if call.rope is not None and rotates(layer):
            q, k = rotate(q, k, self._apply_rope, call.rope, grid, start, stop)
        return [q, k, *rest]

    def _apply_rope(self, tensor: Tensor, rows: Tensor) -> Tensor:
        config = self._layer.config
        return apply_rotary_pos_emb(tensor, rows, config=config, mscale=_yarn_get_concentration_factor_from_config(config))

    def attention(self, projected: Sequence[Tensor], call: LayerCall) -> Tensor:
        q, k, v, *gate = projected
        o = self._core_attention(q, k, v, call)
        return gated(self._layer.self_attention._apply_output_gate, o, gate[0]) if gate else o

    def _core_attention(self, q: Tensor, k: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        if self._attend is not None:
            if call.attention_mask is not None:
                raise UnsupportedError(
                    "--memo-attention: the layers are given an attention mask, and this backend knows only its own causal one. Set "
                    "--no-create-attention-mask-in-dataloader where the mask is causal, else take --memo-attention host."
                )
            return self._attend(q, k, v)
        attention = self._layer.self_attention
        return attention.core_attention(
            q, k, v, call.attention_mask, attn_mask_type=attention.attn_mask_type, attention_bias=None, packed_seq_params=None
        )

    def out(self, o: Tensor, x: Tensor, call: LayerCall) -> Tensor:
        layer = self._layer
        projected = layer.self_attention.linear_proj(o)
        with layer.bias_dropout_add_exec_handler():
            hidden = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)(projected, x, layer.hidden_dropout)
        return layer._forward_mlp(hidden)

    def out_graph(self, o: Tensor, x: Tensor, call: LayerCall) -> Tensor:
        if self._output_is_read():
            return self.out(o, x, call)
        with without_output(self._layer.mlp.linear_fc2):
            return self.out(o, x, call)

    def _output_is_read(self) -> bool:
        """Whether something reads fc2's output when it is recomputed: a module's forward hook (which may also change it), or dropout, whose
        kernel gives other random numbers to other strides. Hooks before a forward pass see inputs alone: data parallelism has them everywhere."""
        mlp = self._layer.mlp
        drops = self._layer.training and self._layer.hidden_dropout > 0
        return bool(drops or mlp._forward_hooks or mlp.linear_fc2._forward_hooks or global_hooks._global_forward_hooks)

    def random_state(self) -> Optional[rng.RandomState]:
        return rng.current() if self._layer.training and self._layer.hidden_dropout > 0 else None

    def replayed(self, state: rng.RandomState) -> ContextManager[None]:
        return rng.replayed(state)

    def fused(self, parameters: Sequence[Tensor]) -> Sequence[bool]:
        return [any(p is weight for weight in self._fused_weights) and hasattr(p, "main_grad") for p in parameters]
