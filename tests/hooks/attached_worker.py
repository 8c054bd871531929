"""What may be done to an attached model, and what is refused; prints one JSON line of results by name."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from megatron_memo import cpu

cpu.install()

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_memo.attention.backends import make_backend
from megatron_memo.config import MemoConfig
from megatron_memo.errors import MemoError
from megatron_memo.hooks import attach, capture

SEQUENCE = 16
IDS = torch.arange(2 * SEQUENCE).remainder(64).view(2, SEQUENCE)
POSITIONS = torch.arange(SEQUENCE).expand_as(IDS)


def build():
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=SEQUENCE, position_embedding_type="rope")


def start(model, attend=None):
    x, call = capture.first_call(model, SEQUENCE, 2, torch.device("cpu"))
    config = MemoConfig(enabled=True, alpha=0.5, tiles=2, keep_layers=0, cpu=True, host_gib=1.0)
    return attach.attach(capture.layers_of(model), config, x, call, attend=attend)


def forward(model, mask=None):
    return model(IDS, POSITIONS, mask, labels=IDS).mean()


def message(action):
    try:
        action()
    except (MemoError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def hooked_parameter(model):
    start(model)
    model.decoder.layers[1].mlp.linear_fc1.weight.register_hook(lambda g: g * 2)
    return message(lambda: forward(model))


def hooked_attention(model):
    start(model)
    model.decoder.layers[1].self_attention.register_forward_hook(lambda *a: None)
    return message(lambda: forward(model))


def patched_layer(model):
    model.decoder.layers[0].forward = lambda *a, **k: None
    return message(lambda: attach.attach(model.decoder.layers, MemoConfig(enabled=True), torch.zeros(1, 1, 1), None))


def attached_twice(model):
    start(model)
    return message(lambda: start(model))


def masked_with_another_backend(model):
    start(model, make_backend("sdpa", scale=8**-0.5))
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    return message(lambda: forward(model, mask))


def detached_before_backward(model):
    session = start(model)
    loss = forward(model)
    session.detach()
    return message(loss.backward)


def ordinary(model):
    start(model)
    return message(lambda: forward(model).backward())


def main() -> None:
    for name, value in dict(RANK="0", WORLD_SIZE="1").items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    cases = (hooked_parameter, hooked_attention, patched_layer, attached_twice, masked_with_another_backend, detached_before_backward, ordinary)
    print(json.dumps({case.__name__: case(build()) for case in cases}))


if __name__ == "__main__":
    main()
