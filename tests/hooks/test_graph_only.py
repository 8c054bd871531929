"""hooks/graph_only.py against a stand-in for TransformerEngine's Linear, which calls its product and its sums by name from its module."""

import contextlib
import sys
import types

import pytest
import torch

from megatron_memo.hooks.graph_only import without_output

MODULE = "transformer_engine.stand_in.linear"
SOURCE = '''
import torch

calls = []

def general_gemm(A, B, out_dtype=None, ub=None, quantization_params=None, bias=None):
    calls.append("general_gemm")
    return torch.matmul(B, A.t()).to(out_dtype), None, None, None

def reduce_scatter_along_first_dim(inp, tp_group, async_op=False):
    calls.append("reduce_scatter_along_first_dim")
    return inp[: inp.shape[0] // tp_group.size()].clone(), None

def allreduce(inp, tp_group=None, async_op=False):
    calls.append("allreduce")
    return inp.clone(), None

class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        if module.fails:
            raise RuntimeError("out of memory")
        ctx.save_for_backward(x, weight)
        ctx.rows = x.shape[0]
        out, *_ = general_gemm(weight, x, out_dtype=x.dtype, ub=module.ub)
        if module.reduce == "scatter":
            out, _ = reduce_scatter_along_first_dim(out, module.group)
        elif module.reduce == "all":
            out, _ = allreduce(out, module.group)
        return out

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.repeat(ctx.rows // dy.shape[0], *[1] * (dy.dim() - 1))
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2), None

class Linear(torch.nn.Module):
    fails, ub, reduce, group = False, None, None, None

    def __init__(self, size_in, size_out):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size_out, size_in, generator=torch.Generator().manual_seed(1), dtype=torch.float64))

    def forward(self, x):
        return _Linear.apply(x, self.weight, self), None
'''


class Two:
    def size(self):
        return 2


@pytest.fixture
def engine(monkeypatch):
    module = types.ModuleType(MODULE)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def linear_of(engine, **settings):
    """As Megatron's own linears: a class derived from TransformerEngine's."""
    linear = type("RowParallel", (engine.Linear,), {})(6, 4)
    for name, value in settings.items():
        setattr(linear, name, value)
    return linear


def gradients(linear, context):
    x = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    with context:
        y = linear(x)[0]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return y.detach(), torch.autograd.grad(y, [x, linear.weight], dy)


@pytest.mark.parametrize("reduce", [None, "scatter", "all"])
def test_gradients_are_the_same_and_neither_product_nor_sum_runs(engine, reduce):
    linear = linear_of(engine, reduce=reduce, group=Two())
    y, expected = gradients(linear, contextlib.nullcontext())
    engine.calls.clear()
    empty, found = gradients(linear, without_output(linear))
    assert engine.calls == []
    assert empty.shape == y.shape and empty.dtype == y.dtype and not empty.any() and y.any()
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_the_output_takes_no_memory(engine):
    linear = linear_of(engine)
    with without_output(linear):
        y = linear(torch.ones(8, 2, 6, dtype=torch.float64))[0]
    assert y.untyped_storage().nbytes() == y.element_size()


def test_afterwards_the_linear_computes_again_also_when_it_failed(engine):
    linear = linear_of(engine)
    names = ("general_gemm", "reduce_scatter_along_first_dim", "allreduce")
    before = [getattr(engine, name) for name in names]
    linear.fails = True
    with pytest.raises(RuntimeError, match="out of memory"), without_output(linear):
        linear(torch.ones(2, 6, dtype=torch.float64))
    linear.fails = False
    assert [getattr(engine, name) for name in names] == before and "forward" not in vars(linear)
    assert linear(torch.ones(2, 6, dtype=torch.float64))[0].any()


def test_other_linears_of_the_segment_compute_their_output(engine):
    fc2, proj = linear_of(engine), linear_of(engine)
    with without_output(fc2):
        assert proj(torch.ones(2, 6, dtype=torch.float64))[0].any()


@pytest.mark.parametrize("other", ["own forward", "overlapped buffers", "unknown product", "not TransformerEngine's"])
def test_what_is_not_known_computes_its_output(engine, other):
    linear = linear_of(engine, reduce="scatter", group=Two())
    if other == "own forward":
        forward = linear.forward
        linear.forward = lambda x: forward(x)
    elif other == "overlapped buffers":
        linear.ub = object()
    elif other == "unknown product":
        engine.general_gemm = lambda weight, x, out_dtype, ub: (x @ weight.t(), None)
    else:
        linear = torch.nn.Sequential(torch.nn.Linear(6, 4, dtype=torch.float64), torch.nn.Unflatten(-1, (1, 4)))
    expected, found = gradients_of_first(linear, contextlib.nullcontext()), gradients_of_first(linear, without_output(linear))
    assert found[0].any() and all(torch.equal(a, b) for a, b in zip(expected, found))


def gradients_of_first(linear, context):
    x = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    with context:
        y = linear(x)
    y = y[0] if isinstance(y, tuple) else y
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *linear.parameters()][:2])]
