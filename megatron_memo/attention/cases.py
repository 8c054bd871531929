"""Inputs of attention on which a wrong mask shows.

On random data a late row averages thousands of keys, and one key too many or too few drowns in rounding. So some keys are *marked*: every
row prefers them, by so much that they share about half of its weight, however long the sequence. A row that misses a marked key, or sees
one too early, is off by its share, many times what rounding does.
"""

from __future__ import annotations

import math
from typing import List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

_SEED = 20240717


class Case(NamedTuple):
    """One attention problem: batch b, ``heads`` query heads over ``groups`` key/value heads of ``head_dim`` elements, ``seq`` rows."""

    seq: int
    batch: int
    heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float

    @property
    def elements(self) -> int:
        """Elements of the largest tensor: q, as o; k and v are never larger."""
        return self.seq * self.batch * self.heads * self.head_dim

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads} heads over {self.groups} groups of {self.head_dim} elements"
        return f"{self.seq} rows, batch {self.batch}, {heads}, {dtype} on {self.device.type}"


def marks_of_small(seq: int) -> List[int]:
    """Both ends and the last row of every 64: no kernel's block of rows or keys is without one."""
    return _inside({0, 1, seq // 2, *range(63, seq, 64), seq - 3, seq - 2, seq - 1}, seq)


def marks_of_long(case: Case) -> List[int]:
    """Both ends, sixteen between, and where the index of an element, or a byte, passes a power of two that an integer may not hold."""
    spread = {case.seq * i // 17 for i in range(1, 17)}
    edges = {(1 << bits) // (case.batch * width * case.head_dim) for bits in (30, 31, 32) for width in (case.heads, case.groups)}
    ends = {0, 1, 127, 128, case.seq - 129, case.seq - 128, case.seq - 3, case.seq - 2, case.seq - 1}
    return _inside(spread | edges | ends, case.seq)


def _inside(positions: set, seq: int) -> List[int]:
    return sorted(position for position in positions if 0 <= position < seq)


def make_inputs(case: Case, marks: Sequence[int]) -> Tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """q [s, b, heads, d], k and v [s, b, groups, d], with the keys ``marks`` marked, and the generator that made them, for more.

    Private generators: torch's own are not touched. Scores of unmarked keys have a standard deviation near 1 whatever ``scale`` is.
    """
    generator = torch.Generator(device=case.device).manual_seed(_SEED)

    def draw(width: int) -> Tensor:
        return torch.randn((case.seq, case.batch, width, case.head_dim), generator=generator, dtype=case.dtype, device=case.device)

    q, k, v = draw(case.heads), draw(case.groups), draw(case.groups)
    spread = (abs(case.scale) * math.sqrt(case.head_dim)) ** -0.5
    # exp(boost) * marks = s: marked keys together weigh about what the others do.
    boost = math.log(max(case.seq / len(marks), 2.0))
    length = math.sqrt(boost / abs(case.scale))
    # One direction a group: a head that reads another group's keys does not find the marks. The rest of q has no part in it, and marked keys
    # have half of the others' rest, so that marks weigh nearly alike and none can be missed unseen.
    direction = torch.randn((case.groups, case.head_dim), generator=generator, dtype=torch.float64, device=case.device)
    direction /= direction.norm(dim=-1, keepdim=True)
    of_heads = direction.repeat_interleave(case.heads // case.groups, dim=0).to(case.dtype)
    q.addcmul_(torch.einsum("sbhd,hd->sbh", q, of_heads)[..., None], of_heads, value=-1.0)
    q.mul_(spread).add_(of_heads * math.copysign(length, case.scale))
    k.mul_(spread)
    k[list(marks)] = k[list(marks)] * 0.5 + direction.to(case.dtype) * length
    return q, k, v, generator
