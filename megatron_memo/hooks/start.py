"""What is checked and said before the first step."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence

import torch
from megatron.core import parallel_state

from ..attention import backends, check, context
from ..config import MemoConfig
from ..errors import UnsupportedError
from ..swap.schedule import Schedule
from . import capture
from .attach import Session, signature
from .segments import Attend
from .self_check import self_check
from .training import print_once

GIB = 1 << 30


def checked_attention(layer: Any, config: MemoConfig, args: Any, device: torch.device) -> Optional[Attend]:
    """The core attention of this run, compared with a float32 reference; None when it is Megatron's own.

    Raises AttentionError when it is wrong, UnsupportedError when another backend cannot stand for Megatron's.
    """
    attention = layer.self_attention
    attend = None
    description = backends.describe(config.attention)
    scale = _softmax_scale(layer)
    if config.attention != "host":
        attend = backends.make_backend(config.attention, scale=scale)
    tried = attend if attend is not None else _host(layer)
    shape = dict(
        batch=args.micro_batch_size,
        heads=attention.num_attention_heads_per_partition,
        groups=attention.num_query_groups_per_partition,
        head_dim=attention.hidden_size_per_attention_head,
        dtype=layer.config.params_dtype,
        device=device,
    )
    ranks = args.context_parallel_size
    rows = None
    if ranks > 1:
        tried = context.whole_sequence(tried, parallel_state.get_context_parallel_group())
        rows = 2 * ranks * math.ceil(check.small_rows(device) / (2 * ranks))
    check.require(check.check_small(tried, scale=scale, seq=rows, **shape), description)
    if args.seq_length // ranks * args.micro_batch_size * shape["heads"] * shape["head_dim"] > 1 << 31:
        if ranks > 1:
            print_once("--memo: with context parallelism attention is checked on a short sequence alone, not at full length.")
        else:
            check.require(check.check_long(tried, seq=args.seq_length, scale=scale, description=description, **shape), description)
    return attend


def _softmax_scale(layer: Any) -> float:
    """What q k^T is multiplied with. Raises UnsupportedError where that depends on the layer."""
    config = layer.config
    if getattr(config, "apply_query_key_layer_scaling", False):
        raise UnsupportedError("--memo: --apply-query-key-layer-scaling is not supported; leave it out.")
    if getattr(config, "softmax_scale", None) is not None:
        return config.softmax_scale
    return 1.0 / math.sqrt(layer.self_attention.hidden_size_per_attention_head)


def _host(layer: Any) -> Attend:
    attention = layer.self_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with _not_training(attention.core_attention):  # dropout has no reference
            return run(q, k, v)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.core_attention(q, k, v, None, attn_mask_type=attention.attn_mask_type, attention_bias=None, packed_seq_params=None)

    return attend


@contextmanager
def _not_training(module: torch.nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def check_layers(models: Sequence[Any], args: Any, device: torch.device, attend: Optional[Attend]) -> List[str]:
    """Runs the self-check on one layer of each kind of all model chunks; returns a line on each."""
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    tokens = min(tokens_of_rank(args), 16 * shards if device.type == "cpu" else max(256, 16 * shards))
    lines, seen = [], set()
    for model in models:
        x, call = capture.first_call(model, tokens, args.micro_batch_size, device)
        for layer in capture.layers_of(model):
            kind = signature(layer)
            if kind not in seen:
                seen.add(kind)
                found = self_check(layer, x, call, attend)
                lines.append("; ".join(f"{n}: largest difference {d.relative:.1e} of {d.allowed:.1e} allowed ({d.tensor})" for n, d in found))
    return lines


def tokens_of_rank(args: Any) -> int:
    """Tokens of a sample that this rank's tensor-parallel group holds: context parallelism cuts the sequence."""
    return args.seq_length // args.context_parallel_size


def _scheduled_samples(schedule: Optional[str]) -> List[int]:
    """The batch sizes of --step-batch-size-schedule ("0:8 1M:16"), which goes without --global-batch-size: Megatron then sets that to one micro-batch
    a rank."""
    sizes = [step.rpartition(":")[2].upper() for step in (schedule or "").replace(",", " ").split()]
    thousands = {"K": 1, "M": 2, "B": 3, "T": 4}
    return [int(float(size.rstrip("KMBT")) * 1000 ** thousands.get(size[-1:], 0)) for size in sizes]


def schedule_of(models: Sequence[Any], args: Any) -> Schedule:
    """The order of passes on this rank. With a growing batch, that of the largest one: it has the most passes in flight."""
    config = models[0].config
    groups = args.micro_batch_size * args.data_parallel_size
    samples = max([args.global_batch_size, *_scheduled_samples(getattr(args, "step_batch_size_schedule", None))])
    return Schedule(
        stages=config.pipeline_model_parallel_size,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        chunks=len(models),
        micro_batches=max(1, samples // groups),
        group=config.microbatch_group_size_per_vp_stage or 0,
    )


def summary(session: Session, checked: List[str]) -> str:
    """A few lines for the start of the log."""
    report, config = session.report(), session.config
    resident = sum(tile.policy.resident for tile in session.tiled)
    totals = ", ".join(f"{report[key + '_bytes'] / GIB:.3f} GiB {key}" for key in ("swapped", "kept", "recomputed"))
    return (
        f"--memo: {len(session.layers)} layers, {config.tiles} tiles, alpha {config.alpha:g}, keep {config.keep:g}, {resident} of them "
        f"resident, attention {config.attention}\n--memo: a forward pass has {totals}; host slab {report['host_slab_bytes'] / GIB:.3f} GiB for "
        f"{report['passes_in_flight']} in flight\n"
        f"--memo: self-check against stock: {' | '.join(checked)}"
    )
