"""A small core attention for sequences that context parallelism has cut: gathers keys and values. Megatron's own that can is TransformerEngine's, on a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_memo.attention.context import rows_of


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(torch.nn.Module):
    """q, k, v [s, b, heads, d], the rows of one rank, to o [s, b, heads * d]: causal, with dropout."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs):
        super().__init__()
        self.config = config

    def forward(self, q, k, v, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        group = parallel_state.get_context_parallel_group()
        places = [rows_of(rank, group.size(), group.size() * q.shape[0]) for rank in range(group.size())]
        k, v = (_Gather.apply(tensor, group).repeat_interleave(q.shape[2] // k.shape[2], 2) for tensor in (k, v))
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(torch.cat(places) > places[group.rank()][:, None], float("-inf")).softmax(-1)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            weights = torch.nn.functional.dropout(weights, self.config.attention_dropout, self.training)
        return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)
