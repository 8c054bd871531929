"""What one layer keeps between its forward and its backward pass, and the order in which that is sent for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, Dict, FrozenSet, List, Optional, Protocol, Sequence, Tuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from ..policy.tiles import Action, LayerPolicy, Tile
from ..swap.executor import Executor, Group, Handle
from .grid import Grid
from .saved import Names, saving_into


# What the qkv segment makes of x and attention takes: names of the whole-sequence tensors. Not every layer has a gate.
PROJECTED = ("q", "k", "v", "gate")


class Segments(Protocol):
    """A layer's three segments. qkv and out are token-local: any rows can be run alone.

    Attributes:
        shards: shards of the sequence that a full-sequence tensor holds (the tensor-parallel size with sequence parallelism, else 1).
        qkv_parameters, out_parameters: the parameters that need gradients, each in exactly one list.
    """

    shards: int
    qkv_parameters: Sequence[Tensor]
    out_parameters: Sequence[Tensor]

    def begin(self) -> None:
        """Called once before a pass."""

    def qkv(self, x: Tensor, call: Any, grid: Grid, start: int, stop: int) -> Sequence[Tensor]:
        """x rows [stop - start, b, h] to rows of PROJECTED, or its first three, [shards * (stop - start), b, heads, d]."""

    def attention(self, projected: Sequence[Tensor], call: Any) -> Tensor:
        """Whole-sequence tensors, as ``qkv`` makes them, to o [shards * s, b, heads * d]."""

    def out(self, o: Tensor, x: Tensor, call: Any) -> Tensor:
        """Rows of o and x to rows of y [stop - start, b, h]."""

    def out_graph(self, o: Tensor, x: Tensor, call: Any) -> Tensor:
        """As ``out`` for a recomputation, where y's graph matters and its values are read by nobody."""

    def random_state(self) -> Any:
        """What the random numbers that ``out`` draws next depend on, or None where it draws none. qkv draws none; attention runs once."""

    def replayed(self, state: Any) -> ContextManager[None]:
        """Within it ``out`` draws what it drew after ``state`` (from ``random_state``, not None); it leaves no trace."""

    def fused(self, parameters: Sequence[Tensor]) -> Sequence[bool]:
        """Which of ``parameters`` have their gradient added to ``main_grad`` by the backward kernels themselves."""

    def untouched(self, call: Any) -> FrozenSet[int]:
        """Storages that must stay as they are: parameters, gradients, buffers, tensors that all layers share."""


@dataclass
class Recorded:
    """The ends of a tile's graph, and the group that holds what it saved."""

    group: Optional[Group]
    action: Action
    inputs: List[GradientEdge]
    outputs: List[GradientEdge]
    handles: List[Handle] = field(default_factory=list)


@dataclass
class PassBytes:
    """Bytes of a pass by what became of them."""

    swapped_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0


class Chain:
    """The passes of one micro-batch in forward order: each knows, weakly, the one whose backward pass comes after its own."""

    def __init__(self) -> None:
        self._last: Callable[[], Optional["LayerPass"]] = lambda: None

    def append(self, state: "LayerPass", first: bool) -> Callable[[], Optional["LayerPass"]]:
        previous = (lambda: None) if first else self._last
        self._last = weakref.ref(state)
        return previous


@dataclass
class TiledLayer:
    """A layer and how it is run.

    Attributes:
        first: whether a forward pass of the model chunk begins with this layer.
        received: the input comes from another pipeline stage, whose schedule keeps it until the backward pass: swapping it would free nothing.
        block_bytes: host bytes of one pass, as measured.
        ahead: groups that are sent for before they are needed.
        min_bytes: smaller storages are not worth a copy and stay.
    """

    segments: Segments
    policy: LayerPolicy
    executor: Executor
    chain: Chain
    first: bool = True
    received: bool = False
    block_bytes: int = 0
    ahead: int = 2
    min_bytes: int = 1 << 16


class LayerPass:
    """State of one layer and one micro-batch. The graph's nodes lead here; nothing here leads back to them but the tiles' own graphs."""

    def __init__(self, layer: TiledLayer, call: Any, grid: Grid, record: bool) -> None:
        self.layer, self.call, self.grid, self.record = layer, call, grid, record
        self.tiles: Tuple[Tile, ...] = layer.policy.cut(grid.rows)
        self.io_action = Action.KEEP if layer.policy.resident else Action.SWAP
        self.names = Names()
        self.qkv_tiles: List[Optional[Recorded]] = []
        self.out_tiles: List[Optional[Recorded]] = []
        # By the start of each tile that will run again.
        self.random_states: Dict[int, Any] = {}
        self.input: Optional[Recorded] = None
        self.attention: Optional[Recorded] = None
        self.do: Optional[Tensor] = None
        self.dx: Optional[Tensor] = None
        self.bytes = PassBytes()
        # As they are now: a parameter frozen or unfrozen before the backward pass changes the segments' lists.
        self.qkv_parameters: List[Tensor] = list(layer.segments.qkv_parameters)
        self.out_parameters: List[Tensor] = list(layer.segments.out_parameters)
        self._versions = [parameter._version for parameter in (*self.qkv_parameters, *self.out_parameters)]
        self._position: Dict[int, int] = {}
        self._order: List[Group] = []
        if record:
            self.previous = layer.chain.append(self, layer.first)
            self.store = layer.executor.open(layer.block_bytes)

    # Forward

    def records(self, tile: Tile) -> bool:
        """Whether ``tile``'s graph is recorded in the forward pass. When bytes are measured, all are."""
        return self.record and (tile.action is not Action.RECOMPUTE or self.layer.executor.measuring)

    def new_group(self) -> Group:
        return Group()

    def hooks(self, group: Group, known: Dict[str, Tensor]) -> saved_tensors_hooks:
        device = next(iter(known.values())).device
        return saving_into(group, self.names, known, self.layer.segments.untouched(self.call), device, self.layer.min_bytes)

    def hold(self, x: Tensor) -> Recorded:
        """The layer's input as a group of its own, sent at once unless the layer is resident or the pipeline keeps it."""
        group = self.new_group()
        action = Action.KEEP if self.layer.received else self.io_action
        recorded = Recorded(group, action, [], [], [group.add(x)])
        self.dispatch(recorded)
        return recorded

    def dispatch(self, recorded: Recorded) -> None:
        """Sends, keeps or (when measuring what recomputation saves) forgets a group, and counts it."""
        group, executor = recorded.group, self.layer.executor
        if recorded.action is Action.SWAP:
            self.bytes.swapped_bytes += group.size_bytes
            executor.send(group, self.store)
        elif recorded.action is Action.KEEP:
            self.bytes.kept_bytes += group.size_bytes
        else:
            self.bytes.recomputed_bytes += group.size_bytes
        if executor.measuring:
            group.forget()

    # Backward

    def start_backward(self) -> None:
        """x and o under their names again. Raises RuntimeError when a parameter has been written since the forward pass, as autograd does."""
        if self._versions != [parameter._version for parameter in (*self.qkv_parameters, *self.out_parameters)]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter of a tiled layer was written "
                "between its forward and its backward pass (an optimizer step in between?)"
            )
        self._order = self._backward_order()
        self._position = {id(group): index for index, group in enumerate(self._order)}
        for name, recorded in (("x", self.input), ("o", self.attention)):
            self.wait_for(recorded)
            self.names.tensors[name] = recorded.handles[0].tensor()

    def wait_for(self, recorded: Recorded) -> None:
        """Has ``recorded``'s bytes on the device, and sends for the groups of this layer that come after it."""
        executor, index = self.layer.executor, self._position[id(recorded.group)]
        for group in self._order[index + 1 : index + 1 + self.layer.ahead]:
            executor.fetch(group, self.store)
        executor.ready(recorded.group, self.store)

    def send_for_previous(self) -> None:
        """Sends for what the layer before needs first. Attention's backward pass, queued next, hides it."""
        previous = self.previous()
        if previous is not None:
            for group in previous._backward_order()[: 2 + self.layer.ahead]:
                self.layer.executor.fetch(group, previous.store)

    def finish(self, recorded: Recorded) -> None:
        """``recorded``'s graph has run backward: its bytes are free."""
        if recorded.group is not None:
            self.layer.executor.close(recorded.group)

    def end_backward(self) -> None:
        self.names.tensors.clear()
        self.finish(self.input)
        self.input = None
        self._order, self._position = [], {}

    def _backward_order(self) -> List[Group]:
        recorded = [self.input, self.attention, *reversed(self.out_tiles), *self.qkv_tiles]
        return [r.group for r in recorded if r is not None]
