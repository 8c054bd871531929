"""Several true ranks on one GPU (or none): a process group that copies every tensor to the host, lets gloo move the bytes, and copies back.

NCCL refuses two ranks on one GPU; this stands in for it. Exact and slow, never for timing. Sums are taken in rank order, in float32 for 16-bit
types and rounded once, so every rank gets the same bits. Messages travel as bytes, so any dtype works.

Start it inside torchrun (or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) with :func:`init`.
"""

from __future__ import annotations

import threading
from functools import reduce as fold
from typing import Callable, List, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.futures import Future

from ..errors import UnsupportedError

NAME = "staged"

_new_group = dist.new_group


def _done(result):
    """A finished Work that holds ``result``."""
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of ``tensor``, flat, as uint8."""
    return tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)


def _write(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Writes flat host bytes into ``tensor``, of any strides."""
    tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


def _name_of(op) -> str:
    op = getattr(op, "reduceOp", op)
    name = next((name for name, value in dist.ReduceOp.RedOpType.__members__.items() if op == value), str(op))
    if name not in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        raise UnsupportedError(f"staged: expected reduction SUM, AVG, MAX, MIN or PRODUCT, found {name}.")
    return name


def reduce_parts(parts: Sequence[torch.Tensor], op) -> torch.Tensor:
    """Reduces one tensor a rank in rank order; 16-bit floats in float32, rounded once. ``op`` is a ReduceOp or options that hold one."""
    name = _name_of(op)
    dtype = parts[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        parts = [part.float() for part in parts]
    combine = {"MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul}.get(name, torch.add)
    total = fold(combine, parts)
    if name == "AVG":
        total = total / len(parts)
    return total.to(dtype)


class StagedGroup(dist.ProcessGroup):
    """One group of true ranks; gloo moves the bytes. Collectives are complete when they return."""

    def __init__(self, common) -> None:
        super().__init__(common.group_rank, common.group_size)
        self._rank = common.group_rank
        self._size = common.group_size
        self._gloo = ProcessGroupGloo(dist.PrefixStore(NAME, common.store), self._rank, self._size, common.timeout)

    def getBackendName(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _gather(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Every rank's ``tensor``, on the host. All ranks pass the same shape."""
        _synchronize()
        data = _bytes(tensor)
        parts = [[torch.empty_like(data) for _ in range(self._size)]]
        self._gloo.allgather(parts, [data]).wait()
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts[0]]

    @staticmethod
    def _op(opts):
        return dist.ReduceOp.SUM if opts is None else opts.reduceOp

    # One tensor for all.

    def barrier(self, opts=None):
        _synchronize()
        self._gloo.barrier().wait()
        return _done([])

    def broadcast(self, tensors, opts):
        for tensor in tensors:
            tensor.detach().copy_(self._gather(tensor)[opts.rootRank])
        _synchronize()
        return _done(tensors)

    def allreduce(self, tensors, opts=None):
        for tensor in tensors:
            tensor.detach().copy_(reduce_parts(self._gather(tensor), self._op(opts)))
        _synchronize()
        return _done(tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        return self.allreduce(tensors, opts)

    def reduce(self, tensors, opts):
        for tensor in tensors:
            total = reduce_parts(self._gather(tensor), opts.reduceOp)
            if self._rank == opts.rootRank:
                tensor.detach().copy_(total)
        _synchronize()
        return _done(tensors)

    # One part from each rank.

    def allgather(self, outputs, inputs, opts=None):
        for parts, tensor in zip(outputs, inputs):
            for part, data in zip(parts, self._gather(tensor)):
                part.copy_(data.view(part.shape))
        _synchronize()
        return _done(outputs)

    def _allgather_base(self, output, tensor, opts=None):
        output.copy_(torch.cat([part.reshape(-1) for part in self._gather(tensor)]).view(output.shape))
        _synchronize()
        return _done(output)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def gather(self, outputs, inputs, opts):
        parts = self._gather(inputs[0])
        if self._rank == opts.rootRank:
            for output, part in zip(outputs[0], parts):
                output.copy_(part)
        _synchronize()
        return _done(outputs)

    # One part to each rank.

    def _reduce_scatter_base(self, output, tensor, opts=None):
        mine = [part.reshape(self._size, -1)[self._rank] for part in self._gather(tensor)]
        output.copy_(reduce_parts(mine, self._op(opts)).view(output.shape))
        _synchronize()
        return _done(output)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def reduce_scatter(self, outputs, inputs, opts=None):
        for output, parts in zip(outputs, inputs):
            self._reduce_scatter_base(output, torch.stack(list(parts)), opts)
        return _done(outputs)

    def scatter(self, outputs, inputs, opts):
        root = self._rank == opts.rootRank
        for i, output in enumerate(outputs):
            parts = torch.stack(list(inputs[i])) if root else output.new_zeros(self._size, *output.shape)
            output.copy_(self._gather(parts)[opts.rootRank][self._rank])
        _synchronize()
        return _done(outputs)

    # One part from each rank to each rank.

    def alltoall_base(self, output, tensor, output_splits, input_splits, opts=None):
        n = self._size
        splits = list(input_splits) or [tensor.shape[0] // n] * n
        if sum(splits) != tensor.shape[0]:
            raise ValueError(f"staged all_to_all: splits {splits} of {n} ranks are {sum(splits)} rows, the input has {tensor.shape[0]}.")
        all_splits = [part.tolist() for part in self._gather(torch.tensor(splits, dtype=torch.int64))]
        padded = tensor.new_zeros(max(sum(rows) for rows in all_splits), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        mine = []
        for rows, part in zip(all_splits, self._gather(padded)):
            start = sum(rows[: self._rank])
            mine.append(part[start : start + rows[self._rank]])
        output.copy_(torch.cat(mine).view(output.shape))
        _synchronize()
        return _done(output)

    def alltoall(self, outputs, inputs, opts=None):
        flat = torch.cat([part.reshape(-1) for part in inputs])
        received = torch.cat([output.reshape(-1) for output in outputs])
        self.alltoall_base(received, flat, [], [part.numel() for part in inputs])
        for output, part in zip(outputs, received.split([output.numel() for output in outputs])):
            output.copy_(part.view(output.shape))
        _synchronize()
        return _done(outputs)

    # Point to point: the bytes travel in the background; a received tensor is written when they are here.

    def send(self, tensors, destination, tag=0):
        _synchronize()
        data = [_bytes(tensor) for tensor in tensors]
        return self._finish(self._gloo.send(data, destination, tag), lambda: data)

    def recv(self, tensors, source, tag=0):
        _synchronize()
        data = [torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8) for tensor in tensors]
        work = self._gloo.recv(data, source, tag)

        def land():
            for tensor, part in zip(tensors, data):
                _write(tensor, part)
            _synchronize()

        return self._finish(work, land)

    @staticmethod
    def _finish(work, then: Callable):
        """A Work that is done after ``work`` and then ``then()`` have run in a thread of their own."""
        future = Future()
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def run():
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                work.wait()
                then()
                future.set_result([])
            except Exception as error:  # handed to whoever waits
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return _create_work_from_future(future)


def _create(common, options=None) -> StagedGroup:
    return StagedGroup(common)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _new_staged_group(*args, **kwargs):
    """torch.distributed.new_group, with staged where nccl is asked for."""
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = NAME
    if kwargs.get("backend") in (None, NAME):
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
    return _new_group(*args, **kwargs)


def _install(function) -> None:
    dist.new_group = function
    dist.distributed_c10d.new_group = function


def init() -> None:
    """Starts torch.distributed over staged groups; until :func:`shutdown`, ``new_group`` gives one where ``nccl`` is asked for."""
    dist.init_process_group(NAME)
    _install(_new_staged_group)


def shutdown() -> None:
    """Ends torch.distributed and gives ``new_group`` back."""
    _install(_new_group)
    dist.destroy_process_group()
