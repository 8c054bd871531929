"""The tiled layer against plain autograd, on the copy simulator."""

import gc
import itertools

import pytest
import torch

from megatron_memo.policy.tiles import LayerPolicy
from megatron_memo.swap.executor import Executor
from megatron_memo.swap.simulator import SimulatedStreams
from megatron_memo.swap.slab import HostSlab
from megatron_memo.swap.streams import Order
from megatron_memo.testing.toy_layer import ToyLayer
from megatron_memo.tiles.layer import TiledLayer, run
from megatron_memo.tiles.layer_pass import Chain

ROWS, BATCH, HIDDEN, LAYERS = 13, 2, 8, 4
BLOCK_BYTES = 1 << 17


class WithoutWait:
    """Streams that leave out one ordering."""

    def __init__(self, streams, left_out):
        self._streams, self._left_out = streams, left_out

    def __getattr__(self, name):
        return getattr(self._streams, name)

    def wait(self, stream, event, order):
        if order is not self._left_out:
            self._streams.wait(stream, event, order)


class Stack:
    """Toy layers, plain and tiled, on one slab of ``blocks`` pass blocks."""

    def __init__(self, policy, resident=1, left_out=None, blocks=LAYERS, limit=None, dtype=torch.float64):
        torch.manual_seed(3)
        self.layers = [ToyLayer(HIDDEN, dtype=dtype) for _ in range(LAYERS)]
        self.streams = SimulatedStreams()
        self.slab = HostSlab(torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8))
        self.executor = Executor(WithoutWait(self.streams, left_out), self.slab, limit)
        chain = Chain()
        self.tiled = [
            TiledLayer(
                layer,
                LayerPolicy(policy.alpha, policy.keep, policy.tiles, resident=index >= LAYERS - resident),
                self.executor,
                chain,
                first=index == 0,
                block_bytes=0 if index >= LAYERS - resident else BLOCK_BYTES,
                min_bytes=1,
            )
            for index, layer in enumerate(self.layers)
        ]
        self.parameters = [p for layer in self.layers for p in layer.parameters()]

    def plain(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def memo(self, x, hook_at=None, hook=None):
        for index, tile in enumerate(self.tiled):
            x = run(tile, x, None)
            if index == hook_at:
                x.register_hook(hook)
        return x

    def gradients(self, forward, x, w):
        x = x.clone().requires_grad_()
        return torch.autograd.grad((forward(x) * w).sum(), [x, *self.parameters])


def inputs(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, BATCH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def worst(expected, found):
    return max(((f - e).abs().max() / e.abs().max()).nan_to_num(float("inf")).item() for e, f in zip(expected, found))


POLICIES = [
    LayerPolicy(alpha, keep, tiles)
    for (alpha, keep), tiles in itertools.product([(0, 0), (1, 0), (0, 1), (0.5, 0), (0.3, 0.4), (0.01, 0.02)], [1, 2, 5, 13, 100])
]


@pytest.mark.parametrize("resident", [0, 1, LAYERS])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"alpha{p.alpha}-keep{p.keep}-tiles{p.tiles}")
def test_gradients_equal_those_of_plain_autograd(policy, resident):
    stack = Stack(policy, resident, limit=4 * ROWS * BATCH * HIDDEN * 8)
    x, w = inputs()
    assert worst(stack.gradients(stack.plain, x, w), stack.gradients(stack.memo, x, w)) < 1e-13
    assert stack.streams.torn_copies == 0
    assert stack.slab.used_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha, keep", [(1, 0), (0, 1), (0, 0)])
def test_one_tile_is_bit_identical(dtype, alpha, keep):
    stack = Stack(LayerPolicy(alpha, keep, 1), dtype=dtype)
    x, w = inputs(dtype=dtype)
    for expected, found in zip(stack.gradients(stack.plain, x, w), stack.gradients(stack.memo, x, w)):
        assert torch.equal(expected, found)


def steps_with(left_out, policy):
    """Gradients of a second step, stock and tiled, with one ordering left out. The first step leaves other data in every place."""
    stack = Stack(policy, resident=0, left_out=left_out)
    stack.gradients(stack.memo, *inputs(1))
    x, w = inputs(2)
    return stack.gradients(stack.plain, x, w), stack.gradients(stack.memo, x, w)


@pytest.mark.parametrize("policy", [LayerPolicy(1, 0, 1), LayerPolicy(0.5, 0, 4), LayerPolicy(0, 0, 4)], ids=["one tile", "half swapped", "x and o"])
@pytest.mark.parametrize("left_out", [Order.PRODUCED, Order.LEFT, Order.LANDING_FREE, Order.ARRIVED], ids=lambda order: order.name)
def test_a_wait_that_is_left_out_shows_in_the_gradient(left_out, policy):
    expected, found = steps_with(left_out, policy)
    assert not worst(expected, found) < 1e-3


def interleaved(left_out):
    """The slot of the first layers is read by a prefetch and taken by another forward pass before that prefetch has run.

    That other pass runs from a hook inside the first one's backward pass, as a pipeline schedule may do between backward passes of layers.
    """
    stack = Stack(LayerPolicy(0.3, 0, 3), resident=0, left_out=left_out, blocks=LAYERS + 2)
    x, w = inputs(1)
    other = inputs(2)[0].requires_grad_()
    kept = []

    def another_forward(gradient):
        with torch.enable_grad():  # a backward pass runs without
            kept.append(stack.memo(other))

    # Layers 3 and 2 have run backward when the hook on layer 1's output fires: layer 1's prefetch is queued and its slots are free.
    found = stack.gradients(lambda x: stack.memo(x, hook_at=1, hook=another_forward), x, w)
    assert kept
    return stack.gradients(stack.plain, x, w), found


def test_a_slot_is_written_again_only_after_its_reader():
    assert worst(*interleaved(None)) < 1e-13


def test_a_slot_written_too_early_shows_in_the_gradient():
    assert not worst(*interleaved(Order.SLOT_READ)) < 1e-3


def test_a_dropped_graph_returns_its_host_bytes():
    stack = Stack(LayerPolicy(0.5, 0, 3), resident=0)
    gc.disable()
    try:
        y = stack.memo(inputs()[0].requires_grad_())
        assert stack.slab.used_bytes == LAYERS * BLOCK_BYTES
        del y
        assert stack.slab.used_bytes == 0
    finally:
        gc.enable()
    x, w = inputs()
    assert worst(stack.gradients(stack.plain, x, w), stack.gradients(stack.memo, x, w)) < 1e-13


def test_a_backward_pass_that_stops_half_way_leaves_the_next_step_right():
    stack = Stack(LayerPolicy(0.5, 0, 3), resident=0)
    x, w = inputs()
    middle = stack.memo(x.clone().requires_grad_())
    torch.autograd.grad((middle * w).sum(), stack.layers[-1].qkv_parameters)
    del middle
    assert stack.slab.used_bytes == 0
    assert worst(stack.gradients(stack.plain, x, w), stack.gradients(stack.memo, x, w)) < 1e-13
    assert stack.streams.torn_copies == 0


def test_a_second_backward_pass_is_refused():
    stack = Stack(LayerPolicy(0.5, 0, 3))
    y = stack.memo(inputs()[0].requires_grad_()).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        y.backward()


def test_gradients_of_gradients_are_refused():
    stack = Stack(LayerPolicy(0.5, 0, 3))
    y = stack.memo(inputs()[0].requires_grad_()).sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y, stack.parameters, create_graph=True)


def test_a_parameter_written_between_forward_and_backward_is_refused_as_autograd_does():
    stack = Stack(LayerPolicy(0.5, 0, 3))
    y = stack.memo(inputs()[0].requires_grad_()).sum()
    with torch.no_grad():
        stack.layers[1].fc1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_evaluation_records_nothing_and_equals_training_bit_for_bit():
    stack = Stack(LayerPolicy(0.5, 0.2, 3), resident=0)
    x = inputs()[0]
    with torch.no_grad():
        y = stack.memo(x)
    assert stack.slab.peak_bytes == 0
    assert torch.equal(y, stack.memo(x.clone().requires_grad_()).detach())


def test_parameters_that_need_no_gradient_get_none():
    stack = Stack(LayerPolicy(0.5, 0, 3))
    frozen = stack.layers[1]
    frozen.linear_qkv.weight.requires_grad_(False)
    x, w = inputs()
    trainable = [p for p in stack.parameters if p.requires_grad]

    class Trainable(ToyLayer):
        qkv_parameters = property(lambda self: [p for p in ToyLayer.qkv_parameters.fget(self) if p.requires_grad])

    frozen.__class__ = Trainable
    expected = torch.autograd.grad((stack.plain(x) * w).sum(), trainable)
    found = torch.autograd.grad((stack.memo(x) * w).sum(), trainable)
    assert worst(expected, found) < 1e-13


def live_bytes():
    """Bytes of all tensors alive, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_the_sequence_of_allocations_copies_and_waits_is_the_same_at_every_step():
    stack = Stack(LayerPolicy(0.4, 0.2, 3), resident=1, limit=4 * ROWS * BATCH * HIDDEN * 8)
    x, w = inputs()
    calls = []

    class Recorder:
        def __getattr__(self, name):
            def call(*args):
                calls.append((name, *(a.numel() if isinstance(a, torch.Tensor) else a for a in args if not hasattr(a, "clock"))))
                return getattr(stack.streams, name)(*args)

            return call

    stack.executor._streams = Recorder()
    sequences = []
    for _ in range(3):
        calls.clear()
        stack.gradients(stack.memo, x, w)
        sequences.append(list(calls))
    assert sequences[1] == sequences[2]  # in the first step no slot has a reader yet
    assert {"landing", "copy", "wait", "release"} <= {name for name, *_ in sequences[1]}


def test_memory_after_fifty_steps_equals_memory_after_two():
    stack = Stack(LayerPolicy(0.4, 0.2, 3), resident=1)
    x, w = inputs()
    gc.collect()
    gc.disable()
    try:
        seen = {}
        for step in range(1, 51):
            stack.gradients(stack.memo, x, w)
            if step in (2, 50):
                objects = len(gc.get_objects())
                seen[step] = (live_bytes(), objects)
        assert seen[50][0] == seen[2][0]
        assert abs(seen[50][1] - seen[2][1]) < 50  # bookkeeping of this test itself
    finally:
        gc.enable()
