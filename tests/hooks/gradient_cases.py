"""What the gradient tests combine: each value of each feature meets each value of every other one in at least one case."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any, Dict, List

FEATURES: Dict[str, tuple] = {
    "norm": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "swiglu"),
    "groups": ("mha", "gqa", "one group"),
    "qk_norm": (False, True),
    "position": ("learned_absolute", "rope", "none", "yarn", "rope scaled", "rope in some layers"),
    "gate": (False, True),
    "bias": (True, False),
    "tied": (True, False),
    "micro_batch": (1, 2),
    "micro_batches": (1, 2),
    "sequence_parallel": (True, False),
    "fused": (False, True),
    "dropout": ("none", "hidden", "attention", "both"),
    "policy": ("1 tile swapped", "1 tile recomputed", "2 tiles half", "3 tiles mixed", "5 tiles recomputed", "4 tiles kept", "16 tiles swapped"),
    "keep_layers": (0, 1),
}

# alpha, keep, tiles. 3 and 5 divide no length used here.
POLICIES = {
    "1 tile swapped": (1.0, 0.0, 1),
    "1 tile recomputed": (0.0, 0.0, 1),
    "2 tiles half": (0.5, 0.0, 2),
    "3 tiles mixed": (0.4, 0.3, 3),
    "5 tiles recomputed": (0.0, 0.0, 5),
    "4 tiles kept": (0.0, 1.0, 4),
    "16 tiles swapped": (1.0, 0.0, 16),
}


@dataclass(frozen=True)
class Case:
    norm: str
    activation: str
    groups: str
    qk_norm: bool
    position: str
    gate: bool
    bias: bool
    tied: bool
    micro_batch: int
    micro_batches: int
    sequence_parallel: bool
    fused: bool
    dropout: str
    policy: str
    keep_layers: int

    @property
    def tiles_draw_their_own(self) -> bool:
        """Whether the tiles' random numbers are others than stock's: the same tiles, all kept, are then what is compared with."""
        return self.dropout in ("hidden", "both") and POLICIES[self.policy][2] > 1

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in asdict(self).items())


def pairwise(features: Dict[str, tuple]) -> List[Dict[str, Any]]:
    """Few rows in which every pair of values of two features occurs: greedy, deterministic."""
    names = list(features)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in features[a]
        for y in features[b]
    }
    rows = []
    while left:
        # Start from the first pair that is missing, then give every other feature the value that covers most of what is missing.
        a, x, b, y = min(left, key=str)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(features[name], key=lambda value: sum(_pair(names, name, value, other, row[other]) in left for other in row))
        left -= {_pair(names, a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: row[name] for name in names})
    return rows


def _pair(names: List[str], a: str, x: Any, b: str, y: Any) -> tuple:
    return (a, x, b, y) if names.index(a) < names.index(b) else (b, y, a, x)


# Fused kernels sum into float32, and where tiles draw random numbers of their own they are compared with themselves: so every pair of the other
# features also meets where several tiles are compared with stock in float64 alone.
EXACT = {**FEATURES, "fused": (False,), "dropout": ("none",), "policy": ("3 tiles mixed", "5 tiles recomputed", "16 tiles swapped")}
CASES = list(dict.fromkeys(Case(**row) for features in (FEATURES, EXACT) for row in pairwise(features)))
