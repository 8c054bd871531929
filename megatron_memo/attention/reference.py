"""Causal attention, forward and backward, written out in float64 for all rows or a sample of them.

    S = scale q k^T (keys up to the row)   P = softmax(S)     o = P v
    dv = P^T do    dP = do v^T    D = rowsum(do * o)    dS = P * (dP - D)    dq = scale dS k    dk = scale dS^T q

Why a sample is exact: o and dq of a row need that row of q and do, and all keys. dk and dv of a key need every row of do that is not zero,
so with do zero outside the sampled rows they need those rows alone, whatever the key. Keys are taken in blocks; the softmax statistics are
computed here, not taken from the kernel under test. Float64 on any device: float32 products may run in TF32, and 1M keys add up.
"""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple, Tuple

import torch
from torch import Tensor

# Elements of one [shared heads, rows, keys] intermediate: 32 MiB in float64.
_BLOCK_ELEMENTS = 1 << 22


class Rows(NamedTuple):
    """Some rows of a tensor, and how large they would be if the terms of their sums had random signs.

    Attributes:
        value: [n, b, heads, d], float64.
        magnitude: [n, b, heads], float64. A kernel rounds each term of a sum, so its error goes with this and not with the sum: dq of row 0 is
            exactly 0, a difference of two equal terms, and no kernel that rounds gets 0.
    """

    value: Tensor
    magnitude: Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: Tensor, keys: Tensor, scale: float) -> Dict[str, Rows]:
    """o, dq of ``rows`` and dk, dv of ``keys`` for an output gradient that is ``do`` at ``rows`` and zero elsewhere.

    Args:
        q: [s, b, heads, d], any dtype.
        k, v: [s, b, groups, d]; head i reads group i // (heads / groups).
        do: [len(rows), b, heads, d].
        rows, keys: ascending positions, int64, on q's device.
        scale: factor of q k^T.

    Returns: "o", "dq", "dk", "dv" to :class:`Rows` of ``rows`` (o, dq; heads) and ``keys`` (dk, dv; groups).

    Memory: the results, and about ten intermediates of 32 MiB. Work: 8 products of [rows, d] with [d, s] a head.
    """
    batch, heads, head_dim = q.shape[1:]
    groups = k.shape[2]
    shared = heads // groups
    found = {
        name: Rows(*(torch.zeros(shape, dtype=torch.float64, device=q.device) for shape in ((n, batch, width, head_dim), (n, batch, width))))
        for name, n, width in (("o", len(rows), heads), ("dq", len(rows), heads), ("dk", len(keys), groups), ("dv", len(keys), groups))
    }
    with torch.no_grad():
        for sample in range(batch):
            for group in range(groups):
                of_group = slice(group * shared, (group + 1) * shared)
                result = _group(
                    q[rows, sample, of_group].transpose(0, 1).double(), k[:, sample, group], v[:, sample, group],
                    do[:, sample, of_group].transpose(0, 1).double(), rows, keys, scale,
                )
                for name, (value, square) in result.items():
                    where = of_group if name in ("o", "dq") else slice(group, group + 1)
                    found[name].value[:, sample, where] = value.transpose(0, 1)
                    found[name].magnitude[:, sample, where] = square.sqrt().transpose(0, 1)
    return found


def _group(q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: Tensor, keys: Tensor, scale: float) -> Dict[str, Tuple[Tensor, Tensor]]:
    """One sample, one group: q, do [shared, rows, d]; k, v [s, d] -> value [heads or 1, n, d] and squared magnitude [heads or 1, n] of each."""
    shared, n_rows, head_dim = q.shape

    def scores() -> Iterator[Tuple[int, int, Tensor, Tensor, Tensor]]:
        """Blocks of keys: first and last position, scores [shared, rows, block], k and v [block, d]."""
        size = max(1, _BLOCK_ELEMENTS // (shared * n_rows))
        for start in range(0, int(rows[-1]) + 1, size):
            stop = min(start + size, k.shape[0])
            k_block, v_block = k[start:stop].double(), v[start:stop].double()
            s = (q @ k_block.T).mul_(scale)
            s.masked_fill_(torch.arange(start, stop, device=q.device) > rows[:, None], float("-inf"))
            yield start, stop, s, k_block, v_block

    log_sum = q.new_full((shared, n_rows), float("-inf"))
    for _, _, s, _, _ in scores():
        log_sum = torch.logaddexp(log_sum, s.logsumexp(-1))

    o, o_square = torch.zeros_like(q), torch.zeros_like(log_sum)
    for _, _, s, _, v_block in scores():
        p = s.sub_(log_sum[..., None]).exp_()
        o += p @ v_block
        o_square += p.square_() @ _square(v_block)

    d = (o * do).sum(-1, keepdim=True)
    # The size of one entry of dP and D: a product of vectors of these norms, neither aligned nor orthogonal.
    do_square, d_square = _square(do), _square(o)
    dq, dq_square = torch.zeros_like(q), torch.zeros_like(log_sum)
    dk, dv = (q.new_zeros(1, len(keys), head_dim) for _ in range(2))
    dk_square, dv_square = (q.new_zeros(1, len(keys)) for _ in range(2))
    for start, stop, s, k_block, v_block in scores():
        p = s.sub_(log_sum[..., None]).exp_()
        ds = (do @ v_block.T).sub_(d).mul_(p)
        dq += (ds @ k_block).mul_(scale)
        k_square, v_square = _square(k_block), _square(v_block)
        p_square = p.square()
        dq_square += do_square * (p_square @ (v_square * k_square) + d_square * (p_square @ k_square)) * (scale * scale / head_dim)

        first, last = torch.searchsorted(keys, torch.tensor([start, stop], device=keys.device)).tolist()
        if first == last:
            continue
        columns, here = keys[first:last] - start, slice(first, last)
        p, ds, p_square = p[..., columns], ds[..., columns], p_square[..., columns]
        dv[0, here] = torch.einsum("hrk,hrd->kd", p, do)
        dk[0, here] = torch.einsum("hrk,hrd->kd", ds, q).mul_(scale)
        dv_square[0, here] = torch.einsum("hrk,hr->k", p_square, do_square)
        q_square = _square(q) * do_square
        dk_square[0, here] = (
            torch.einsum("hrk,hr->k", p_square, q_square) * v_square[columns] + torch.einsum("hrk,hr->k", p_square, q_square * d_square)
        ) * (scale * scale / head_dim)
    return {"o": (o, o_square), "dq": (dq, dq_square), "dk": (dk, dk_square), "dv": (dv, dv_square)}


def _square(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1)
