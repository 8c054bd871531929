"""One transformer layer, run tile by tile: two autograd Functions whose backward passes are written out in order.

    forward   x leaves; per tile qkv -> rows of q, k, v; attention; o leaves; per tile out -> rows of y
    backward  x and o come (sent for a layer ahead); per tile the out segment's gradient: rows of do and dx;
              per tile q, k, v rebuilt, those tiles' graphs kept; attention's gradient: dq, dk, dv;
              per tile the qkv segment's gradient, with dx as the residual's

The layer is two Functions, not one, so that the gradient of the layer's output is free before attention's backward pass needs its memory,
and so that data parallelism can reduce the out segment's gradients while attention is still running. All state between them is a
:class:`~megatron_memo.tiles.layer_pass.LayerPass`, which nothing in the graph leads back to.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import Function, grad
from torch.autograd.graph import get_gradient_edge

from ..policy.tiles import Action, LayerPolicy
from .gradients import GradientSum
from .grid import Grid
from .layer_pass import PROJECTED, LayerPass, Recorded, Segments, TiledLayer
from .saved import anchor, compact

__all__ = ["LayerPolicy", "Segments", "TiledLayer", "run"]


def run(layer: TiledLayer, x: Tensor, call: Any) -> Tensor:
    """The layer's output y [s, b, h] for its input x [s, b, h]; ``call`` goes to the segments as it is.

    Without gradients (evaluation) the same tiles run and nothing is recorded.
    """
    segments = layer.segments
    wanted = x.requires_grad or any(p.requires_grad for p in (*segments.qkv_parameters, *segments.out_parameters))
    segments.begin()
    x_alone = x if x.untyped_storage().nbytes() == x.numel() * x.element_size() and x.is_contiguous() else x.contiguous().clone()
    state = LayerPass(layer, call, Grid(x.shape[0], segments.shards), record=torch.is_grad_enabled() and wanted)
    if not state.record:
        state.names.tensors["x"] = x_alone.detach()
        _forward_attention(state)
        return _forward_out(state)
    token = _AttentionHalf.apply(state, x_alone, *state.qkv_parameters)
    return _OutHalf.apply(state, token, *state.out_parameters)


def _record_tile(state: LayerPass, action: Action, inputs: Sequence[Tensor], known: dict, segment: Any) -> Tuple[Recorded, List[Tensor]]:
    """Runs ``segment(*inputs)`` with its graph recorded; returns the graph's ends and the plain outputs."""
    group = state.new_group()
    ends = [anchor(tensor) for tensor in inputs]
    with torch.enable_grad(), state.hooks(group, known):
        outputs = segment(*ends)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    recorded = Recorded(group, action, [get_gradient_edge(t) for t in ends], [get_gradient_edge(t) for t in outputs])
    return recorded, [tensor.detach() for tensor in outputs]


def _forward_attention(state: LayerPass) -> None:
    """The qkv segment and attention. Leaves ``o`` under its name in ``state``."""
    segments, grid, call, x = state.layer.segments, state.grid, state.call, state.names.tensors["x"]
    if state.record:
        state.input = state.hold(x)
    full: Optional[List[Tensor]] = None
    for tile in state.tiles:
        rows = x if grid.whole(tile.start, tile.stop) else x[tile.start : tile.stop]
        recorded = None
        if state.records(tile):
            recorded, outputs = _record_tile(
                state, tile.action, [rows], {"x": x}, lambda r: _with_residual(segments.qkv(r, call, grid, tile.start, tile.stop), r)
            )
            qkv = compact(outputs[:-1])
            outputs = None
            recorded.handles = [recorded.group.add(tensor) for tensor in qkv]
            state.dispatch(recorded)
        else:
            qkv = [tensor.detach() for tensor in segments.qkv(rows, call, grid, tile.start, tile.stop)]
        state.qkv_tiles.append(recorded)
        full = _into_full(full, qkv, grid, tile.start, tile.stop)
    full = compact(full)
    if state.record:
        known = dict(zip(PROJECTED, full))
        recorded, (o,) = _record_tile(state, state.io_action, full, known, lambda *projected: segments.attention(projected, call))
        recorded.handles = [recorded.group.add(o)]
        state.attention = recorded
        full = qkv = known = None
        # Attention has long work queued: by the time it is done, what was sent before it has left.
        state.layer.executor.settle()
        state.dispatch(recorded)
    else:
        o = segments.attention(full, call)
    state.names.tensors["o"] = o.detach()


def _with_residual(qkv: Sequence[Tensor], x: Tensor) -> List[Tensor]:
    """q, k, v (and a gate) and x itself, as the residual path takes it.

    The residual's gradient then meets the norm's where it does in stock Megatron: first, and one addition at a time. A norm of several
    operations sums its own parts in another order otherwise, and the last bit of dx with it.
    """
    return [*qkv, x.view_as(x)]


def _into_full(full: Optional[List[Tensor]], rows: Sequence[Tensor], grid: Grid, start: int, stop: int) -> List[Tensor]:
    """``rows`` of the tile written into full-sequence tensors, which a single tile already is."""
    if grid.whole(start, stop):
        return list(rows)
    full = full if full is not None else [grid.empty(tensor) for tensor in rows]
    for whole, tensor in zip(full, rows):
        grid.put(whole, tensor, start, stop)
    return full


def _forward_out(state: LayerPass) -> Tensor:
    """The out segment: y [s, b, h]. Lets go of x and o."""
    segments, grid, call = state.layer.segments, state.grid, state.call
    x, o = state.names.tensors.pop("x"), state.names.tensors.pop("o")
    y: Optional[Tensor] = None
    for tile in state.tiles:
        o_rows = grid.take(o, tile.start, tile.stop)
        x_rows = x if grid.whole(tile.start, tile.stop) else x[tile.start : tile.stop]
        recorded = None
        if state.records(tile):
            known = {"x": x, "o": o, "o rows": o_rows}
            recorded, (rows,) = _record_tile(state, tile.action, [o_rows, x_rows], known, lambda a, b: segments.out(a, b, call))
            state.dispatch(recorded)
        else:
            if state.record:
                state.random_states[tile.start] = segments.random_state()
            rows = segments.out(o_rows, x_rows, call).detach()
        state.out_tiles.append(recorded)
        if grid.whole(tile.start, tile.stop):
            y = rows
        else:
            y = y if y is not None else rows.new_empty(grid.rows, *rows.shape[1:])
            y[tile.start : tile.stop] = rows
    return y


def _take_state(ctx: Any) -> LayerPass:
    """The pass of a Function whose backward pass begins. Raises RuntimeError where it cannot be right."""
    if torch.is_grad_enabled():
        raise RuntimeError("gradients of gradients (create_graph=True) are not supported with --memo: second-order terms would be dropped")
    state, ctx.state = ctx.state, None
    if state is None:
        raise RuntimeError("a layer's backward pass ran twice: --memo frees saved activations as it goes (retain_graph is not supported)")
    return state


class _AttentionHalf(Function):
    """x and the qkv segment's parameters to a token that stands for the attention output."""

    @staticmethod
    def forward(ctx: Any, state: LayerPass, x: Tensor, *parameters: Tensor) -> Tensor:
        state.names.tensors["x"] = x.detach()
        _forward_attention(state)
        ctx.state = state
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *token_gradient: Tensor) -> Any:
        state = _take_state(ctx)
        dx, gradients = _backward_attention(state)
        return (None, dx, *gradients)


class _OutHalf(Function):
    """The token and the out segment's parameters to y [s, b, h]."""

    @staticmethod
    def forward(ctx: Any, state: LayerPass, token: Tensor, *parameters: Tensor) -> Tensor:
        y = _forward_out(state)
        ctx.state = state
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        state = _take_state(ctx)
        gradients = _backward_out(state, dy)
        return (None, dy.new_zeros(1), *gradients)


def _backward_out(state: LayerPass, dy: Tensor) -> List[Optional[Tensor]]:
    """The out segment's backward pass. Leaves do and dx in ``state``; returns the parameters' gradients."""
    segments, grid, names = state.layer.segments, state.grid, state.names
    parameters = state.out_parameters
    sums = GradientSum(parameters, len(state.tiles))
    state.start_backward()
    x, o = names.tensors["x"], names.tensors["o"]
    do = dx = None
    for tile, recorded in zip(reversed(state.tiles), reversed(state.out_tiles)):
        whole = grid.whole(tile.start, tile.stop)
        o_rows = grid.take(o, tile.start, tile.stop)
        if recorded is not None:
            state.wait_for(recorded)
            names.tensors["o rows"] = o_rows
            inputs, outputs = recorded.inputs, recorded.outputs
        else:
            x_rows = x if whole else x[tile.start : tile.stop]
            inputs = [o_rows.detach().requires_grad_(), x_rows.detach().requires_grad_()]
            random_state = state.random_states.pop(tile.start)
            with torch.enable_grad(), nullcontext() if random_state is None else segments.replayed(random_state):
                outputs = [segments.out_graph(*inputs, state.call)]
        dy_rows = dy if whole else dy[tile.start : tile.stop]
        do_rows, dx_rows, *of_parameters = grad(outputs, [*inputs, *parameters], [dy_rows], allow_unused=True)
        inputs = outputs = o_rows = x_rows = None
        names.tensors.pop("o rows", None)
        if recorded is not None:
            state.finish(recorded)
        sums.add(of_parameters)
        if whole:
            do, dx = do_rows, dx_rows
        else:
            do = do if do is not None else torch.empty_like(o)
            dx = dx if dx is not None else torch.empty_like(x)
            grid.put(do, do_rows, tile.start, tile.stop)
            dx[tile.start : tile.stop] = dx_rows
        do_rows = dx_rows = of_parameters = None
    state.out_tiles.clear()
    state.do, state.dx = do, dx
    return sums.finish(segments.fused(parameters))


def _backward_attention(state: LayerPass) -> Tuple[Tensor, List[Optional[Tensor]]]:
    """The backward pass of attention and of the qkv segment: dx [s, b, h] and the parameters' gradients."""
    segments, grid, names = state.layer.segments, state.grid, state.names
    parameters = state.qkv_parameters
    sums = GradientSum(parameters, len(state.tiles))
    tiles = _rebuild_qkv(state)
    state.send_for_previous()
    attention, state.attention = state.attention, None
    do, state.do = state.do, None
    d_full = list(grad(attention.outputs, attention.inputs, [do]))
    do = None
    for name in (*PROJECTED[: len(d_full)], "o"):
        del names.tensors[name]
    state.finish(attention)
    attention = None
    dx, state.dx = state.dx, None
    for tile in reversed(state.tiles):
        recorded = tiles.pop()
        whole = grid.whole(tile.start, tile.stop)
        d_rows = [grid.take(tensor, tile.start, tile.stop) for tensor in d_full]
        d_rows.append(dx if whole else dx[tile.start : tile.stop])
        dx_rows, *of_parameters = grad(recorded.outputs, [*recorded.inputs, *parameters], d_rows, allow_unused=True)
        d_rows = None
        state.finish(recorded)
        recorded = None
        sums.add(of_parameters)
        if whole:
            dx = dx_rows
        else:
            dx[tile.start : tile.stop] = dx_rows
        dx_rows = of_parameters = None
    state.end_backward()
    return dx, sums.finish(segments.fused(parameters))


def _rebuild_qkv(state: LayerPass) -> List[Recorded]:
    """q, k, v under their names again, from what was saved or by running the segment; the graphs of all qkv tiles, in order."""
    segments, grid, names, call = state.layer.segments, state.grid, state.names, state.call
    x = names.tensors["x"]
    full: Optional[List[Tensor]] = None
    graphs: List[Recorded] = []
    for index, tile in enumerate(state.tiles):
        recorded = state.qkv_tiles[index]
        if recorded is not None:
            state.wait_for(recorded)
            rows = [handle.tensor() for handle in recorded.handles]
        else:
            x_rows = x if grid.whole(tile.start, tile.stop) else x[tile.start : tile.stop]
            x_rows = x_rows.detach().requires_grad_()
            with torch.enable_grad():
                outputs = _with_residual(segments.qkv(x_rows, call, grid, tile.start, tile.stop), x_rows)
            recorded = Recorded(None, Action.RECOMPUTE, [get_gradient_edge(x_rows)], [get_gradient_edge(t) for t in outputs])
            rows = [tensor.detach() for tensor in outputs[:-1]]
            if grid.whole(tile.start, tile.stop):
                rows = compact(rows)
            x_rows = outputs = None
        graphs.append(recorded)
        full = _into_full(full, rows, grid, tile.start, tile.stop)
        rows = recorded = None
    state.qkv_tiles.clear()
    for name, tensor in zip(PROJECTED, full):
        names.tensors[name] = tensor
    return graphs
