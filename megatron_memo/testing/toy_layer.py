"""A small transformer layer in plain torch with the three segments that tiles need, for tests of tiles and swapping without Megatron."""

from __future__ import annotations

from typing import Any, ContextManager, FrozenSet, List, Sequence

import torch
from torch import Tensor, nn

from ..swap.executor import storage_key
from ..tiles.grid import Grid


class ToyLayer(nn.Module):
    """Pre-norm attention and MLP. ``forward`` is the plain layer; ``qkv``, ``attention`` and ``out`` are its segments."""

    shards = 1

    def __init__(self, hidden: int = 8, heads: int = 2, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in = nn.LayerNorm(hidden, dtype=dtype)
        self.linear_qkv = nn.Linear(hidden, 3 * hidden, dtype=dtype)
        self.proj = nn.Linear(hidden, hidden, dtype=dtype)
        self.norm_mlp = nn.LayerNorm(hidden, dtype=dtype)
        self.fc1 = nn.Linear(hidden, 4 * hidden, dtype=dtype)
        self.fc2 = nn.Linear(4 * hidden, hidden, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        grid = Grid(x.shape[0])
        return self.out(self.attention(self.qkv(x, None, grid, 0, x.shape[0]), None), x, None)

    # Segments

    @property
    def qkv_parameters(self) -> List[Tensor]:
        return [*self.norm_in.parameters(), *self.linear_qkv.parameters()]

    @property
    def out_parameters(self) -> List[Tensor]:
        return [p for module in (self.proj, self.norm_mlp, self.fc1, self.fc2) for p in module.parameters()]

    def begin(self) -> None:
        pass

    def qkv(self, x: Tensor, call: Any, grid: Grid, start: int, stop: int) -> Sequence[Tensor]:
        mixed = self.linear_qkv(self.norm_in(x))
        return [part.reshape(*x.shape[:2], self.heads, -1).contiguous() for part in mixed.chunk(3, dim=-1)]

    def attention(self, projected: Sequence[Tensor], call: Any) -> Tensor:
        q, k, v = projected
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)

    def out(self, o: Tensor, x: Tensor, call: Any) -> Tensor:
        hidden = x + self.proj(o)
        return hidden + self.fc2(nn.functional.gelu(self.fc1(self.norm_mlp(hidden))))

    def out_graph(self, o: Tensor, x: Tensor, call: Any) -> Tensor:
        y = self.out(o, x, call)
        return y - y.detach()  # zero everywhere, with y's graph: whoever reads the values gets caught

    def random_state(self) -> Any:
        return None

    def replayed(self, state: Any) -> ContextManager[None]:
        raise NotImplementedError("this layer draws no random numbers")

    def fused(self, parameters: Sequence[Tensor]) -> Sequence[bool]:
        return [False] * len(parameters)

    def untouched(self, call: Any) -> FrozenSet[int]:
        return frozenset(storage_key(p) for p in self.parameters())
