"""Runs the self-check on a Megatron layer, with dropout, whose upstream code is changed on purpose; prints one JSON line."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist

from megatron_memo import cpu

cpu.install()

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import attention as upstream_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_memo.errors import SelfCheckError
from megatron_memo.hooks import capture, random_state
from megatron_memo.hooks.segments import MegatronSegments
from megatron_memo.hooks.self_check import self_check


def change_forward(change: str) -> None:
    """Changes what stock computes, not the parts that tiles call."""
    forward, attend, rotate = TransformerLayer._forward_attention, SelfAttention.forward, upstream_attention.apply_rotary_pos_emb
    mlp = TransformerLayer._forward_mlp

    def changed_attention(self, hidden_states, *args, **kwargs):
        output, bias = attend(self, hidden_states, *args, **kwargs)
        if change == "the attention output is scaled":
            return output * 1.01, bias
        if change == "the projection's bias is dropped":
            return output, torch.zeros_like(bias)
        if change == "the output has a gate":
            return output * torch.sigmoid(hidden_states), bias
        return output, bias

    def changed_rotation(t, freqs, *args, **kwargs):
        if change == "q is scaled after the rotation":
            return rotate(t, freqs, *args, **kwargs) * 1.02
        if change == "k is rotated the other way":
            return rotate(t, -freqs, *args, **kwargs)
        return rotate(t, freqs, *args, **kwargs)

    def changed_layer(self, hidden_states, *args, **kwargs):
        if change == "the residual is taken from the normed input":
            hidden, context = forward(self, hidden_states, *args, **kwargs)
            return hidden + self.input_layernorm(hidden_states) - hidden_states, context
        if change == "the input norm has another epsilon":
            epsilon, self.input_layernorm.eps = self.input_layernorm.eps, 1e-2
            try:
                return forward(self, hidden_states, *args, **kwargs)
            finally:
                self.input_layernorm.eps = epsilon
        if change == "the mlp sees the layer's input":
            hidden, context = forward(self, hidden_states, *args, **kwargs)
            return hidden + 0.01 * hidden_states, context
        return forward(self, hidden_states, *args, **kwargs)

    def changed_core(self, *args, **kwargs):
        q, k, v = tensors(self, *args, **kwargs)
        return q, k, torch.nn.functional.layer_norm(v, v.shape[-1:])

    SelfAttention.forward, TransformerLayer._forward_attention = changed_attention, changed_layer
    upstream_attention.apply_rotary_pos_emb = changed_rotation
    if change == "v is normed":
        tensors = SelfAttention.get_query_key_value_tensors

        def only_in_stock(self, hidden_states, *args, **kwargs):
            # Stock passes split_qkv; tiles do not.
            return changed_core(self, hidden_states, *args, **kwargs) if "split_qkv" in kwargs else tensors(self, hidden_states, *args, **kwargs)

        SelfAttention.get_query_key_value_tensors = only_in_stock
    if change == "the mlp's residual is doubled":

        def stock_only(self, *args, **kwargs):
            output, context = original_forward(self, *args, **kwargs)
            return output + args[0] if args else output + kwargs["hidden_states"], context

        original_forward = TransformerLayer.forward
        TransformerLayer.forward = stock_only


    if change == "recomputed tiles draw new numbers":
        MegatronSegments.replayed = lambda self, state: contextlib.nullcontext()
    if change == "recomputed tiles leave a trace in the random numbers":

        def restored_and_left(self, state):
            random_state.restore(state)
            return contextlib.nullcontext()

        MegatronSegments.replayed = restored_and_left


def originals():
    names = ((SelfAttention, "forward"), (SelfAttention, "get_query_key_value_tensors"), (TransformerLayer, "_forward_attention"), (TransformerLayer, "forward"), (MegatronSegments, "replayed"))
    return [(owner, name, vars(owner).get(name)) for owner, name in names] + [
        (upstream_attention, "apply_rotary_pos_emb", upstream_attention.apply_rotary_pos_emb)
    ]


def main(changes) -> None:
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost").items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.1, attention_dropout=0.1, use_cpu_initialization=True,
        bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, position_embedding_type="rope")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    layer = model.decoder.layers[0]
    for index, parameter in enumerate(layer.parameters()):
        parameter.main_grad = torch.full_like(parameter, float(index))
        parameter.grad_added_to_main_grad = False
    found = {}
    for change in changes:
        saved = originals()
        x, call = capture.first_call(model, 16, 2, torch.device("cpu"))
        state = torch.get_rng_state(), {name: s.clone() for name, s in get_cuda_rng_tracker().get_states().items()}
        change_forward(change)
        message = None
        try:
            self_check(layer, x, call)
        except SelfCheckError as error:
            message = str(error)
        finally:
            for owner, name, value in saved:
                if value is None:
                    vars(owner).get(name) is not None and delattr(owner, name)  # inherited
                else:
                    setattr(owner, name, value)
        tracker = get_cuda_rng_tracker().get_states()
        same = torch.equal(state[0], torch.get_rng_state()) and all(torch.equal(s, tracker[name]) for name, s in state[1].items())
        same &= all(bool((p.main_grad == index).all()) and p.grad is None and not p.grad_added_to_main_grad for index, p in enumerate(layer.parameters()))
        found[change] = {"message": message, "left_as_it_was": bool(same)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
