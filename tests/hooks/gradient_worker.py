"""Run by torchrun: gradients of every parameter of a small GPT, stock Megatron against tiled layers, for all cases of one world size.

Writes one JSON line a case to the file named by the first argument.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

warnings.filterwarnings("ignore")
import torch

import torch.distributed as dist

from megatron_memo import cpu

WORLD = int(os.environ["WORLD_SIZE"])
SEQUENCE, VOCABULARY, HIDDEN, HEADS, LAYERS = 32, 64, 32, 8, 3
# Fused kernels are a GPU's.
ON_CPU = dict(
    use_cpu_initialization=True, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False,
    persist_layer_norm=False,
)
YARN = dict(
    rotary_scaling_factor=4.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0,
    correction_range_round_to_int=True,
)


def stand_in_for_the_fused_kernel() -> None:
    """What apex's extension does on a GPU: adds a weight's gradient to its main_grad."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def wgrad_gemm_accum_fp32(inputs, gradients, main_grad):
        main_grad += (gradients.reshape(-1, gradients.shape[-1]).T @ inputs.reshape(-1, inputs.shape[-1])).to(main_grad.dtype)

    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    sys.modules[module.__name__] = module


stand_in_for_the_fused_kernel()  # Megatron looks for it when it is imported
cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from gradient_cases import CASES, POLICIES, Case
from megatron_memo.config import MemoConfig
from megatron_memo.hooks import allowlist, attach, capture
from megatron_memo.hooks import random_state as rng
from megatron_memo.hooks.self_check import self_check
from megatron_memo.policy.tiles import Action, LayerPolicy


def build(case: Case, dtype: torch.dtype, seed: int = 1) -> DistributedDataParallel:
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    gated = case.activation == "swiglu"
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups={"mha": None, "gqa": 4, "one group": 1}[case.groups],
        attention_output_gate=case.gate,
        no_rope_freq=[0, 1, 0] if case.position == "rope in some layers" else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.1 if case.dropout in ("hidden", "both") else 0.0,
        attention_dropout=0.2 if case.dropout in ("attention", "both") else 0.0,
        tensor_model_parallel_size=WORLD,
        sequence_parallel=case.sequence_parallel and WORLD > 1,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        add_bias_linear=case.bias,
        add_qkv_bias=case.bias,
        normalization=case.norm,
        qk_layernorm=case.qk_norm,
        gradient_accumulation_fusion=case.fused,
        **ON_CPU,
    )
    assert not allowlist.check_config(config), allowlist.check_config(config)
    if case.position == "yarn":  # Megatron's command line sets these
        for name, value in YARN.items():
            setattr(config, f"yarn_{name}", value)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=case.qk_norm, normalization=case.norm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type=case.position.split(" ")[0],
        rope_scaling=case.position == "rope scaled",
        share_embeddings_and_output_weights=case.tied,
        parallel_output=True,
    ).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start as ones and zeros, which hide mistakes
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=dtype))
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=case.fused, overlap_grad_reduce=False), model)


class Gradients(NamedTuple):
    losses: list
    by_name: dict
    random: rng.RandomState


def gradients(model: DistributedDataParallel, case: Case) -> Gradients:
    """Loss and main_grad of every parameter after the case's micro-batches, by Megatron's own hooks; each call draws the same random numbers."""
    model.zero_grad_buffer()
    with rng.preserved():
        losses = forward_and_backward(model, case)
        state = rng.current()
    return Gradients(losses, {name: p.main_grad.clone() for name, p in model.module.named_parameters()}, state)


def forward_and_backward(model: DistributedDataParallel, case: Case) -> list:
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(case.micro_batches):
        ids = torch.randint(0, VOCABULARY, (case.micro_batch, SEQUENCE), generator=generator)
        positions = torch.arange(SEQUENCE).expand_as(ids)
        loss = model(ids, positions, None, labels=ids.roll(-1, 1)).double().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def config_of(case: Case) -> MemoConfig:
    alpha, keep, tiles = POLICIES[case.policy]
    return MemoConfig(enabled=True, alpha=alpha, keep=keep, tiles=tiles, keep_layers=case.keep_layers, cpu=True, host_gib=1.0)


@dataclass(frozen=True)
class AllKept(LayerPolicy):
    """The same tiles, all kept."""

    def cut(self, rows: int):
        return tuple(replace(tile, action=Action.KEEP) for tile in super().cut(rows))


def gradients_of_kept_tiles(model: DistributedDataParallel, case: Case, x, call) -> Gradients:
    session = attach.attach(capture.layers_of(capture.unwrapped(model)), config_of(case), x, call)
    for tile in session.tiled:
        tile.policy = AllKept(**asdict(tile.policy))
    try:
        return gradients(model, case)
    finally:
        session.detach()


def compare(case: Case, dtype: torch.dtype, check: bool) -> dict:
    model = build(case, dtype)
    inner = capture.unwrapped(model)
    stock = gradients(model, case)
    layers = capture.layers_of(inner)
    x, call = capture.first_call(inner, SEQUENCE, case.micro_batch, torch.device("cpu"))
    checked = [[name, list(worst)] for name, worst in self_check(layers[0], x, call)] if check else None
    reference = gradients_of_kept_tiles(model, case, x, call) if case.tiles_draw_their_own else stock
    session = attach.attach(layers, config_of(case), x, call)
    memo = gradients(model, case)
    with torch.no_grad():
        model.eval()
        ids = torch.arange(SEQUENCE).remainder(VOCABULARY).expand(case.micro_batch, -1)
        positions = torch.arange(SEQUENCE).expand_as(ids)
        tiled_evaluation = model(ids, positions, None, labels=ids)
    report = session.report()
    session.detach()
    with torch.no_grad():
        stock_evaluation = model(ids, positions, None, labels=ids)
    after = gradients(model.train(), case)
    # Softmax ignores a bias of k: such a gradient is rounding and nothing else, so no parameter's is taken for smaller than this.
    floor = 1e-4 * max(g.abs().max().item() for g in reference.by_name.values())
    relative = {name: ((memo.by_name[name] - g).abs().max() / g.abs().max().clamp_min(floor)).item() for name, g in reference.by_name.items()}
    worst = max(relative, key=relative.get)
    bound = torch.tensor([relative[worst]], dtype=torch.float64)
    dist.all_reduce(bound, dist.ReduceOp.MAX)
    return {
        "case": case.name,
        "dtype": str(dtype),
        "worst": bound.item(),
        "parameter": worst,
        "identical": all(torch.equal(memo.by_name[name], g) for name, g in reference.by_name.items()) and reference.losses == memo.losses,
        "same_random_numbers_next": reference.random.equals(memo.random) and stock.random.equals(memo.random),
        "losses": [reference.losses, memo.losses],
        "evaluation": (tiled_evaluation - stock_evaluation).abs().max().item(),
        "restored": all(torch.equal(after.by_name[name], g) for name, g in stock.by_name.items()),
        "self_check": checked,
        "swapped_bytes": report["swapped_bytes"],
        "host_peak_bytes": report["host_peak_bytes"],
        "host_slab_bytes": report["host_slab_bytes"],
    }


def one_tile_cases():
    """Cases for bit-identity: every feature at its first and last value, one swapped tile."""
    seen = {}
    for case in CASES:
        changed = Case(**{**case.__dict__, "policy": "1 tile swapped", "fused": False})
        seen.setdefault((changed.norm, changed.activation, changed.position, changed.groups, changed.gate), changed)
    return list(seen.values())[:10]


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    lines = [compare(case, torch.float64, check=index % 8 == 0) for index, case in enumerate(CASES)]
    if WORLD == 1:
        lines += [compare(case, dtype, check=False) for case in one_tile_cases() for dtype in (torch.float32, torch.bfloat16)]
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
