"""Rows of a tile in tensors that hold one rank's shard of the sequence, and in tensors that hold the whole of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """A sequence of ``shards`` shards, of which this rank holds one of ``rows`` rows.

    With sequence parallelism a column-parallel linear gathers a tile [start, stop) of the shards of all ranks. In a full-sequence
    tensor [shards * rows, ...] these rows are ``view(shards, rows, ...)[:, start:stop]``. Without it ``shards`` is 1.
    """

    rows: int
    shards: int = 1

    @property
    def full_rows(self) -> int:
        return self.rows * self.shards

    def whole(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is the whole shard."""
        return start == 0 and stop == self.rows

    def take(self, full: Tensor, start: int, stop: int) -> Tensor:
        """Rows of the tile from ``full`` [shards * rows, ...] as [shards * (stop - start), ...]: a view where the rows are adjacent, else a copy."""
        if self.whole(start, stop):
            return full
        if self.shards == 1:
            return full[start:stop]
        tile = full.new_empty(self.shards * (stop - start), *full.shape[1:])
        self._copy(tile, full, start, stop, into_tile=True)
        return tile

    def put(self, full: Tensor, tile: Tensor, start: int, stop: int) -> None:
        """Writes ``tile`` [shards * (stop - start), ...] into its rows of ``full`` [shards * rows, ...]."""
        self._copy(tile, full, start, stop, into_tile=False)

    def empty(self, tile: Tensor) -> Tensor:
        """An undefined full-sequence tensor of ``tile``'s kind, [shards * rows, ...]."""
        return tile.new_empty(self.full_rows, *tile.shape[1:])

    def _copy(self, tile: Tensor, full: Tensor, start: int, stop: int, into_tile: bool) -> None:
        # One launch that copies each shard's rows as the plain memory they are; copying a strided tensor goes element by element.
        in_full = [shard[start:stop] for shard in full.view(self.shards, self.rows, *full.shape[1:])]
        in_tile = list(tile.view(self.shards, stop - start, *tile.shape[1:]))
        torch._foreach_copy_(*((in_tile, in_full) if into_tile else (in_full, in_tile)))
