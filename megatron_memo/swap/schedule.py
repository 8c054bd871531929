"""How many forward passes of a pipeline stage wait for their backward passes at once, and the host memory that they hold together. Needs no device.

A stage's host memory is sized before the first step, so the order of its passes has to be known: Megatron's own 1F1B, plain and interleaved.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Iterator, List, NamedTuple, Sequence

import torch

from .slab import Block, HostSlab, aligned


class Pass(NamedTuple):
    """One pass of one model chunk; ``forward`` or backward. A chunk's backward passes come in the order of its forward passes."""

    chunk: int
    forward: bool


@dataclass(frozen=True)
class Schedule:
    """The passes of one rank in one training step.

    Attributes:
        stages: pipeline-parallel size.
        stage: this rank's place in the pipeline, from 0.
        chunks: model chunks of a rank (interleaved stages), 1 for plain 1F1B.
        micro_batches: of one rank in one step.
        group: micro-batches that a chunk runs in a row before the next chunk has its turn; 0 stands for ``stages``. Only with several chunks.
    """

    stages: int = 1
    stage: int = 0
    chunks: int = 1
    micro_batches: int = 1
    group: int = 0

    def warm_up(self) -> int:
        """Forward passes before the first backward pass, less the one that comes right before it."""
        if self.stages == 1:
            return 0
        behind = self.stages - self.stage - 1
        ahead = behind if self.chunks == 1 else 2 * behind + (self.chunks - 1) * (self.group or self.stages)
        return min(ahead, self.micro_batches * self.chunks)

    def _chunks_in_turn(self) -> List[int]:
        """The chunk of each forward pass, in order."""
        if self.chunks == 1:
            return [0] * self.micro_batches
        order: List[int] = []
        group = self.group or self.stages
        for first in range(0, self.micro_batches, group):
            in_a_row = min(group, self.micro_batches - first)
            for chunk in range(self.chunks):
                order += [chunk] * in_a_row
        return order

    def passes(self) -> Iterator[Pass]:
        """All passes of a step, in order."""
        forward = self._chunks_in_turn()
        backward = deque(self.chunks - 1 - chunk for chunk in forward)
        if self.stages == 1 and self.chunks == 1:
            for _ in range(self.micro_batches):
                yield Pass(0, True)
                yield Pass(0, False)
            return
        warm_up = self.warm_up()
        for index, chunk in enumerate(forward):
            yield Pass(chunk, True)
            if index >= warm_up:
                yield Pass(backward.popleft(), False)
        for chunk in backward:
            yield Pass(chunk, False)

    def in_flight(self) -> int:
        """The largest number of forward passes, of all chunks together, that wait for their backward passes."""
        waiting = most = 0
        for one in self.passes():
            waiting += 1 if one.forward else -1
            most = max(most, waiting)
        return most


def host_bytes(schedule: Schedule, blocks: Sequence[Sequence[int]]) -> int:
    """The host slab's size in bytes for a step: ``blocks[chunk][layer]`` are the bytes of a layer's pass.

    The slab itself is run through the step, so that gaps between blocks of different sizes are counted too.
    """
    whole_step = schedule.micro_batches * sum(aligned(size) for chunk in blocks for size in chunk)
    slab = HostSlab(torch.empty(whole_step, dtype=torch.uint8, device="meta"))
    waiting: Dict[int, Deque[List[Block]]] = {chunk: deque() for chunk in range(len(blocks))}
    for one in schedule.passes():
        if one.forward:
            waiting[one.chunk].append([slab.take(size) for size in blocks[one.chunk] if size])
        else:
            for block in reversed(waiting[one.chunk].popleft()):
                block.give_back()
    return slab.end_bytes
