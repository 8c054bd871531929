"""Attention over a sequence that context parallelism has cut, seen as attention over the whole of it: so that it can be checked.

Each of N ranks holds two of 2 N pieces, one from the front and one from the back: rank r pieces r and 2 N - 1 - r. A causal mask gives all of
them the same work.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import Attend


def rows_of(rank: int, ranks: int, rows: int) -> Tensor:
    """The positions in a sequence of ``rows`` rows that ``rank`` holds, in its order. ``rows`` is a multiple of 2 * ``ranks``."""
    pieces = torch.arange(rows).view(2 * ranks, -1)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def whole_sequence(attend: Attend, group: dist.ProcessGroup) -> Attend:
    """Attention of whole q, k, v [s, b, heads, d], the same on every rank of ``group``, to the whole o [s, b, heads * d].

    ``attend`` gets each rank's rows. s is a multiple of twice the group's size. Collective over the group, forward and backward.
    """

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [rows_of(rank, group.size(), q.shape[0]).to(q.device) for rank in range(group.size())]
        mine = [_Cut.apply(tensor, rows[group.rank()], group) for tensor in (q, k, v)]
        return _Join.apply(attend(*mine), rows, group)

    return whole


class _Cut(torch.autograd.Function):
    """The rank's rows. Backward: every rank has the gradient of its rows; together they are the whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.shape, ctx.rows, ctx.group = whole.shape, rows, group
        return whole[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None, None]:
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.rows] = gradient
        dist.all_reduce(whole, group=ctx.group)
        return whole, None, None


class _Join(torch.autograd.Function):
    """All ranks' rows in their places. Backward: the rank's own, for every rank has the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, rows: List[Tensor], group: dist.ProcessGroup) -> Tensor:
        ctx.rows = rows[group.rank()]
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in rows]
        dist.all_gather(parts, mine.contiguous(), group=group)
        whole = mine.new_empty(len(rows) * mine.shape[0], *mine.shape[1:])
        for place, part in zip(rows, parts):
            whole[place] = part
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None, None]:
        return gradient[ctx.rows], None, None
