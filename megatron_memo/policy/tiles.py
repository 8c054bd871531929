"""Which token rows of a layer are swapped, kept or recomputed (MEMO paper, section 4.1, with more than two tiles)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Iterator, Tuple


class Action(Enum):
    """What becomes of a tile's skeletal activations between forward and backward."""

    SWAP = "swap"
    KEEP = "keep"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Tile:
    """Token rows [start, stop) of one rank's shard of the sequence, and what becomes of them."""

    start: int
    stop: int
    action: Action


@dataclass(frozen=True)
class LayerPolicy:
    """How one layer is run.

    Attributes:
        alpha: fraction of tokens whose skeletal activations are swapped.
        keep: fraction of tokens whose skeletal activations stay on the GPU.
        tiles: most tiles wanted; a tile has at most ceil(rows / tiles) rows.
        resident: nothing of this layer goes to the host: its input and attention output stay, swapped tiles are kept.
    """

    alpha: float
    keep: float
    tiles: int
    resident: bool = False

    def cut(self, rows: int) -> Tuple[Tile, ...]:
        """The tiles of ``rows`` token rows, in order and without gaps: swapped ones first, then kept, then recomputed.

        Swapped tiles come first so that their copies start early in the forward pass and are needed late in the backward pass of the
        output segment. The fractions are exact to a row; where they do not fall on a tile boundary there is a tile more than asked for.
        """
        if rows < 1:
            raise ValueError(f"a layer needs at least one token row, found {rows}")
        longest = -(-rows // min(self.tiles, rows))
        swapped = round(self.alpha * rows)
        kept = min(round((self.alpha + self.keep) * rows), rows) - swapped
        swap = Action.KEEP if self.resident else Action.SWAP
        return (
            *_split(0, swapped, longest, swap),
            *_split(swapped, swapped + kept, longest, Action.KEEP),
            *_split(swapped + kept, rows, longest, Action.RECOMPUTE),
        )


def _split(start: int, stop: int, longest: int, action: Action) -> Iterator[Tile]:
    """Even tiles of at most ``longest`` rows over [start, stop)."""
    rows = stop - start
    count = -(-rows // longest)
    for index in range(count):
        yield Tile(start + rows * index // count, start + rows * (index + 1) // count, action)
