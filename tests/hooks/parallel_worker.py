"""Run by torchrun: gradients of every parameter under Megatron's own schedules and data parallelism, stock against tiled layers.

Writes one JSON line a case to the file named by the first argument.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from functools import partial

warnings.filterwarnings("ignore")
import torch

import torch.distributed as dist

from gradient_worker import ON_CPU, AllKept  # first: it gives CUDA's names a meaning on a CPU
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from gradient_cases import POLICIES
from megatron_memo.config import MemoConfig
from megatron_memo.errors import AttentionError
from megatron_memo.hooks import allowlist, attach, capture, start
from megatron_memo.hooks import random_state as rng
from megatron_memo.swap.schedule import Schedule
import gathered_attention
from gathered_attention import GatheredAttention
from megatron_memo.attention.context import rows_of
from parallel_cases import CASES, Case, Layout

SEQUENCE, VOCABULARY, HIDDEN, HEADS, LAYERS, MICRO_BATCH = 16, 64, 32, 8, 8, 2


def lay_out(layout: Layout) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.stages,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
    )


def spec(layout: Layout):
    found = get_gpt_layer_local_spec()
    if layout.context > 1:
        found.submodules.self_attention.submodules.core_attention = GatheredAttention
    return found


def build(case: Case) -> list:
    layout = case.layout
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        hidden_dropout=0.1 if case.dropout else 0.0,
        attention_dropout=0.2 if case.dropout else 0.0,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.stages,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=case.fused,
        **ON_CPU,
    )
    assert not allowlist.check_config(config), allowlist.check_config(config)
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.fused,
        use_distributed_optimizer=case.reduction != "plain",
        overlap_grad_reduce=case.reduction.startswith("overlapped"),
        overlap_param_gather=case.reduction.endswith("parameters"),
        bucket_size=20000,
    )
    assert not allowlist.check_config(reduction), allowlist.check_config(reduction)
    chunks = []
    for index in range(layout.chunks):
        stage = index if layout.chunks > 1 else None
        model = GPTModel(
            config,
            spec(layout),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=case.tied,
            parallel_output=True,
            vp_stage=stage,
        ).to(torch.float64)
        chunks.append(DistributedDataParallel(config, reduction, model, disable_bucketing=index > 0))
    for chunk in chunks:
        chunk.broadcast_params()
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def batches(case: Case):
    """Micro-batches of this data-parallel rank: ids, labels and positions [b, s] of its rows. Every stage gets the same ones."""
    rows = own_rows()
    generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    for _ in range(case.micro_batches):
        ids = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator)
        yield ids[:, rows], ids.roll(-1, 1)[:, rows], rows.expand(MICRO_BATCH, -1)


def own_rows() -> torch.Tensor:
    return rows_of(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size(), SEQUENCE)


def forward_step(data, model):
    ids, labels, positions = next(data)
    output = model(ids, positions, None, labels=labels)
    return output, lambda losses: (losses.double().mean(), {"loss": losses.detach().double().mean()})


def gradients(chunks: list, case: Case):
    """Losses, main_grad of every parameter once the step's reductions are over, and the states of the random number generators."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with rng.preserved():
        data = [batches(case) for _ in chunks]
        step = partial(get_forward_backward_func(), forward_step_func=forward_step, num_microbatches=case.micro_batches, seq_length=SEQUENCE)
        found = step(
            data_iterator=data if len(chunks) > 1 else data[0], model=chunks, micro_batch_size=MICRO_BATCH, decoder_seq_length=SEQUENCE, forward_only=False
        )
        state = rng.current()
    named = {f"{index}.{name}": p.main_grad.clone() for index, chunk in enumerate(chunks) for name, p in chunk.module.named_parameters()}
    return [entry["loss"].item() for entry in found], named, state


def tiled(chunks: list, case: Case) -> attach.Session:
    alpha, keep, tiles = POLICIES[case.policy]
    config = MemoConfig(enabled=True, alpha=alpha, keep=keep, tiles=tiles, keep_layers=case.keep_layers, cpu=True, host_gib=1.0)
    layout = case.layout
    tokens = SEQUENCE // layout.context
    with capture.unsynchronised(chunks):
        models = [capture.unwrapped(chunk) for chunk in chunks]
        parts = [
            attach.Chunk(capture.layers_of(m), *capture.first_call(m, tokens, MICRO_BATCH, torch.device("cpu")), not m.pre_process, m.post_process)
            for m in models
        ]
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return attach.attach_chunks(parts, config, schedule=Schedule(layout.stages, stage, layout.chunks, case.micro_batches))


def refuses_another_cut(check) -> bool:
    """Whether the check sees a mask for rows that lie in one piece a rank, as if nothing were dealt out from both ends."""
    right = gathered_attention.rows_of
    gathered_attention.rows_of = lambda rank, ranks, rows: torch.arange(rows).view(ranks, -1)[rank]
    try:
        check()
    except AttentionError:
        return True
    finally:
        gathered_attention.rows_of = right
    return False


def check_start(chunks: list, case: Case) -> list:
    """What a run checks before its first step, with a sequence that is cut: the attention, and one layer against stock."""
    args = argparse.Namespace(
        seq_length=SEQUENCE, context_parallel_size=case.layout.context, micro_batch_size=MICRO_BATCH, tensor_model_parallel_size=case.layout.tensor,
        sequence_parallel=case.layout.tensor > 1,
    )
    with capture.unsynchronised(chunks):
        models = [capture.unwrapped(chunk) for chunk in chunks]
        check = partial(start.checked_attention, capture.layers_of(models[0])[0], MemoConfig(enabled=True, cpu=True), args, torch.device("cpu"))
        check()
        assert refuses_another_cut(check), "an attention that masks by other rows than the rank's passed its check"
        return start.check_layers(models, args, torch.device("cpu"), None)


def compare(case: Case) -> dict:
    chunks = build(case)
    losses, stock, random = gradients(chunks, case)
    # With dropout the tiles draw their own numbers: the same tiles, all kept, say what is right where there are several.
    if case.dropout and POLICIES[case.policy][2] > 1:
        session = tiled(chunks, case)
        for tile in session.tiled:
            tile.policy = AllKept(**asdict(tile.policy))
        losses, stock, random = gradients(chunks, case)
        session.detach()
    checked = check_start(chunks, case) if case.layout.context > 1 else None
    session = tiled(chunks, case)
    memo_losses, memo, memo_random = gradients(chunks, case)
    report = session.report()
    session.detach()
    floor = 1e-4 * max(g.abs().max().item() for g in stock.values())
    relative = {name: ((memo[name] - g).abs().max() / g.abs().max().clamp_min(floor)).item() for name, g in stock.items()}
    worst = max(relative, key=relative.get)
    differs = max((abs(a - b) for a, b in zip(losses, memo_losses, strict=True)), default=0.0)
    mine = {
        "worst": relative[worst],
        "parameter": worst,
        "losses": differs,
        "checked": checked,
        "same_random_numbers_next": random.equals(memo_random),
        "swapped_bytes": report["swapped_bytes"],
        **{key: report[key] for key in ("passes_in_flight", "host_slab_bytes", "host_peak_bytes")},
    }
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {"case": case.name, "ranks": ranks}


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    # Each layout brings dozens of groups, each with threads of its own that slow the others: one layout after the other, each made once.
    lines, layout = [], None
    for case in sorted(CASES[int(os.environ["WORLD_SIZE"])], key=lambda case: case.layout):
        if case.layout != layout:
            layout = case.layout
            lay_out(layout)
        lines.append(compare(case))
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
