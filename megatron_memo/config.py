"""The configuration of one run: a frozen record, made once at the edge from the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from .errors import ConfigError

ATTENTION_CHOICES = ("host", "fa4", "sdpa")


@dataclass(frozen=True)
class MemoConfig:
    """What the user asked of MEMO.

    Attributes:
        enabled: train with tiled, swapped layers (``--memo``).
        alpha: fraction of tokens whose skeletal activations are swapped, in [0, 1]; the others are recomputed
            (MEMO paper, section 4.1).
        tiles: number of token tiles of a layer's token-local segments, at least 1. More tiles than token rows of a rank means one row a tile.
        keep: fraction of tokens whose skeletal activations stay on the GPU whole, in [0, 1]; ``alpha + keep`` is at most 1.
        keep_layers: the last layers of the model (with pipeline stages, of its last chunk): nothing of them is copied to the host, their input and
            attention output stay on the GPU.
        host_gib: host memory of this rank for swapped activations in GiB; None takes what the machine allows.
        attention: "host" (Megatron's own core attention), "fa4" (FlashAttention-4 called directly) or "sdpa" (torch's).
        cpu: train with no GPU.
        report_dir: directory of report.rankN.json, or None.
        allow_untested: train also with what has not been shown right on its own kernels.
    """

    enabled: bool = False
    alpha: float = 0.0
    tiles: int = 8
    keep: float = 0.0
    keep_layers: int = 1
    host_gib: Optional[float] = None
    attention: str = "host"
    cpu: bool = False
    report_dir: Optional[str] = None
    allow_untested: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for the first value that is out of range."""
        for flag, value in (("--memo-alpha", self.alpha), ("--memo-keep", self.keep)):
            if not (math.isfinite(value) and 0.0 <= value <= 1.0):
                raise ConfigError(f"{flag} is a fraction of tokens: expected 0 to 1, found {value}.")
        if self.alpha + self.keep > 1.0 + 1e-9:
            raise ConfigError(
                f"--memo-alpha {self.alpha} and --memo-keep {self.keep} share the same tokens: their sum is {self.alpha + self.keep:g}, "
                "expected at most 1. Lower one of them; what is neither kept nor swapped is recomputed."
            )
        if self.tiles < 1:
            raise ConfigError(f"--memo-tiles: expected at least 1 tile, found {self.tiles}.")
        if self.keep_layers < 0:
            raise ConfigError(f"--memo-keep-layers: expected 0 or more layers, found {self.keep_layers}.")
        if self.host_gib is not None and not (math.isfinite(self.host_gib) and self.host_gib > 0):
            raise ConfigError(f"--memo-host-gib: expected a positive number of GiB for this rank, found {self.host_gib}.")
        if self.attention not in ATTENTION_CHOICES:
            raise ConfigError(f"--memo-attention: expected one of {', '.join(ATTENTION_CHOICES)}, found {self.attention!r}.")
