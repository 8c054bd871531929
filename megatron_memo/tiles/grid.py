"""Rows of a tile in tensors that hold one rank's shard of the sequence, and in tensors that hold the whole of it."""

from __future__ import annotations

from dataclasses import dataclass

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
        return self._rows(full, start, stop).reshape(-1, *full.shape[1:])

    def put(self, full: Tensor, tile: Tensor, start: int, stop: int) -> None:
        """Writes ``tile`` [shards * (stop - start), ...] into its rows of ``full`` [shards * rows, ...]."""
        rows = self._rows(full, start, stop)
        rows.copy_(tile.reshape(rows.shape))

    def empty(self, tile: Tensor) -> Tensor:
        """An undefined full-sequence tensor of ``tile``'s kind, [shards * rows, ...]."""
        return tile.new_empty(self.full_rows, *tile.shape[1:])

    def _rows(self, full: Tensor, start: int, stop: int) -> Tensor:
        return full.view(self.shards, self.rows, *full.shape[1:])[:, start:stop]
