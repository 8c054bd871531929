"""One process as rank 0 of a world of N in which every peer holds the same data.

Lets one GPU (or CPU) run exactly one rank of, say, 8-way tensor parallelism with sequence parallelism: true shapes and true memory, no
communication and no communication time. Whatever is measured through it must say so.

What the collectives do, so that shapes are right and magnitudes stay those of one rank:

* all-gather repeats this rank's data, reduce-scatter takes this rank's slice, all-reduce is the identity. A sum therefore counts this rank's
  term once, as if the other terms were zero: a true sum of N equal terms would grow by N at every layer.
* all-to-all gives what equal peers would send: this rank's own slice, once from each of them.
* send drops its message. There is no peer whose message could be received: recv raises.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from ..errors import UnsupportedError

NAME = "loopback"


def _done(result):
    """A finished Work that holds ``result``."""
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class LoopbackGroup(dist.ProcessGroup):
    """A group of ``size`` ranks, all of them played by this process, which is rank ``rank`` of it."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size

    def getBackendName(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    # One tensor for all.

    def barrier(self, opts=None):
        return _done([])

    def broadcast(self, tensors, opts=None):
        return _done(tensors)

    def allreduce(self, tensors, opts=None):
        return _done(tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        return _done(tensors)

    def reduce(self, tensors, opts=None):
        return _done(tensors)

    # One part from each rank.

    def allgather(self, outputs, inputs, opts=None):
        for parts, tensor in zip(outputs, inputs):
            for part in parts:
                part.copy_(tensor)
        return _done(outputs)

    def _allgather_base(self, output, tensor, opts=None):
        # Part by part these are plain copies of memory, five times as fast as one from an expanded tensor: what is not compute should be short.
        flat = tensor.reshape(-1)
        for part in output.view(self._size, -1):
            part.copy_(flat)
        return _done(output)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def gather(self, outputs, inputs, opts=None):
        return self.allgather(outputs, inputs)

    # One part to each rank.

    def _reduce_scatter_base(self, output, tensor, opts=None):
        output.copy_(tensor.reshape(self._size, -1)[self._rank].view_as(output))
        return _done(output)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs):
            self._reduce_scatter_base(output, tensor)
        return _done(outputs)

    def reduce_scatter(self, outputs, inputs, opts=None):
        for output, parts in zip(outputs, inputs):
            output.copy_(parts[self._rank])
        return _done(outputs)

    def scatter(self, outputs, inputs, opts=None):
        return self.reduce_scatter(outputs, inputs) if inputs else _done(outputs)

    # One part from each rank to each rank.

    def alltoall_base(self, output, tensor, output_splits, input_splits, opts=None):
        n = self._size
        input_splits = list(input_splits) or [tensor.shape[0] // n] * n
        output_splits = list(output_splits) or [output.shape[0] // n] * n
        mine = input_splits[self._rank]
        if output_splits != [mine] * n:
            raise UnsupportedError(
                f"loopback all_to_all: equal peers each send rank {self._rank} the {mine} rows that its own input has for rank {self._rank}; "
                f"expected output splits {[mine] * n}, found {output_splits}. Use splits that are the same on all ranks, or real ranks."
            )
        start = sum(input_splits[: self._rank])
        part = tensor[start : start + mine]
        output.view(n, *part.shape).copy_(part.expand(n, *part.shape))
        return _done(output)

    def alltoall(self, outputs, inputs, opts=None):
        for output in outputs:
            output.copy_(inputs[self._rank])
        return _done(outputs)

    # Point to point.

    def send(self, tensors, destination, tag=0):
        return _done([])

    def recv(self, tensors, source, tag=0):
        raise UnsupportedError(
            f"loopback recv from rank {source}: there is no such process, so its message is unknown. Use a layout without point-to-point "
            "messages (no pipeline, no ring), or real ranks."
        )


def _create(common, options=None) -> LoopbackGroup:
    return LoopbackGroup(common.group_rank, common.group_size)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def init(world_size: int) -> None:
    """Starts torch.distributed as rank 0 of ``world_size`` loopback ranks. Groups made later are loopback groups too."""
    dist.init_process_group(NAME, rank=0, world_size=world_size, store=dist.HashStore())
