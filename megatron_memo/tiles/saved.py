"""What autograd saves inside a tile: named, held, sent away, or left alone."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..swap.executor import Group, Handle, View, storage_key


class Names:
    """Tensors that hooks refer to by name and that are put back under their names before the backward pass.

    Hooks hold this object, never the layer pass: the pass holds graph nodes, the nodes hold the hooks, and a cycle through autograd
    would keep memory until Python's collector runs.
    """

    def __init__(self) -> None:
        self.tensors: Dict[str, Tensor] = {}


class Named(NamedTuple):
    """Stands for a saved view of a named tensor."""

    name: str
    view: View


class _Anchor(torch.autograd.Function):
    """A non-leaf stand-in for data. Its edge catches the gradient and, unlike a leaf's, keeps no tensor alive."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, data: Tensor) -> Tensor:
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("the gradient of a tile's input is caught at its edge and goes no further")


_TOKEN = torch.empty(0, requires_grad=True)


def anchor(data: Tensor) -> Tensor:
    """``data`` as the input of a graph of its own."""
    with torch.enable_grad():
        return _Anchor.apply(_TOKEN, data)


def compact(tensors: Sequence[Tensor]) -> List[Tensor]:
    """``tensors`` in storages that hold nothing else, copied only where they have to be.

    Views that together fill their storages (q, k and v of one projection) stay: attention then sees the strides that it sees in stock Megatron.
    """
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    if sum(storages.values()) == sum(tensor.numel() * tensor.element_size() for tensor in tensors):
        return list(tensors)
    return [t if t.untyped_storage().nbytes() == t.numel() * t.element_size() else t.clone(memory_format=torch.contiguous_format) for t in tensors]


def saving_into(
    group: Group,
    names: Names,
    known: Dict[str, Tensor],
    untouched: FrozenSet[int],
    device: torch.device,
    min_bytes: int,
) -> saved_tensors_hooks:
    """Hooks under which a tile runs.

    Args:
        group: takes what belongs to the tile alone.
        names: where the tensors in ``known`` will be found again.
        known: tensors that are saved by name only; matched by storage.
        untouched: storages of parameters, buffers, gradients and tensors shared by all layers: saved by reference.
        device: tensors elsewhere (such as RNG states in host memory) are saved by reference.
        min_bytes: smaller storages are saved by reference; copying them costs more than they hold.
    """
    by_storage = {storage_key(tensor): name for name, tensor in known.items()}

    def pack(tensor: Tensor) -> Any:
        if tensor.numel() == 0 or tensor.device != device or type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor
        key = storage_key(tensor)
        if key in by_storage:
            return Named(by_storage[key], View.of(tensor))
        if key in untouched or tensor.untyped_storage().nbytes() < min_bytes:
            return tensor
        return group.add(tensor)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Handle):
            return saved.tensor()
        if isinstance(saved, Named):
            return saved.view.on(names.tensors[saved.name].untyped_storage())
        return saved

    return saved_tensors_hooks(pack, unpack)
