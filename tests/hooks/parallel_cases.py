"""What the tests of parallel layouts combine: every pair of values of two features meets in at least one case of a world size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Dict, List, NamedTuple

from gradient_cases import pairwise


class Layout(NamedTuple):
    """Sizes of tensor (with sequence), pipeline, data and context parallelism, and model chunks a rank."""

    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    data: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.stages * self.data * self.context


LAYOUTS: Dict[int, List[Layout]] = {
    2: [Layout(stages=2), Layout(stages=2, chunks=2), Layout(data=2), Layout(context=2)],
    4: [
        Layout(stages=4), Layout(tensor=2, stages=2), Layout(stages=2, chunks=2, data=2), Layout(tensor=2, data=2), Layout(tensor=2, stages=2, chunks=2), Layout(tensor=2, context=2),
        Layout(stages=2, context=2), Layout(data=2, context=2), Layout(context=4),
    ],
}
FEATURES: Dict[str, tuple] = {
    "reduction": ("plain", "distributed optimizer", "overlapped gradients", "overlapped gradients and parameters"),
    "micro_batches": (4, 8),
    "fused": (False, True),
    "dropout": (False, True),
    "tied": (True, False),
    "policy": ("1 tile swapped", "1 tile recomputed", "2 tiles half", "3 tiles mixed", "4 tiles kept"),
    "keep_layers": (0, 1),
}


@dataclass(frozen=True)
class Case:
    layout: Layout
    reduction: str
    micro_batches: int
    fused: bool
    dropout: bool
    tied: bool
    policy: str
    keep_layers: int

    @property
    def name(self) -> str:
        layout = "x".join(f"{key}{size}" for key, size in self.layout._asdict().items() if size > 1)
        rest = {key: value for key, value in asdict(self).items() if key != "layout"}
        return ", ".join([layout, *(f"{key}={value}" for key, value in rest.items())])


CASES = {world: [Case(**row) for row in pairwise({"layout": tuple(layouts), **FEATURES})] for world, layouts in LAYOUTS.items()}
