"""The attention kernels: right values, no needless copies, clear refusals."""

import importlib.util
import sys
import types

import pytest
import torch

from megatron_memo.attention import backends
from megatron_memo.attention.reference import attention_reference
from megatron_memo.errors import AttentionError, ConfigError

ROWS, HEAD_DIM, SCALE = 37, 16, 0.3
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(batch, heads, groups, dtype, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    shapes = [(ROWS, batch, width, HEAD_DIM) for width in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def written_out(q, k, v):
    """o by autograd-friendly plain torch in float64, one [s, s] matrix a head."""
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch,heads,groups", [(1, 4, 4), (2, 4, 2), (2, 4, 1)])
def test_sdpa_computes_attention_and_its_gradients(batch, heads, groups, dtype):
    q, k, v = make(batch, heads, groups, dtype, requires_grad=True)
    o = backends.make_backend("sdpa", scale=SCALE)(q, k, v)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(o, (q, k, v), do)

    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = written_out(*exact)
    expected_gradients = torch.autograd.grad(expected, exact, do.double())
    assert o.shape == (ROWS, batch, heads * HEAD_DIM) and o.dtype == dtype
    for found, wanted in zip((o, *gradients), (expected, *expected_gradients)):
        assert found.shape == wanted.shape
        assert relative(found, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("batch,heads,groups", [(1, 4, 4), (2, 4, 2)])
@pytest.mark.parametrize("block", [1 << 22, 200])
def test_the_reference_equals_autograd_in_any_block_size(batch, heads, groups, block, monkeypatch):
    monkeypatch.setattr("megatron_memo.attention.reference._BLOCK_ELEMENTS", block)
    q, k, v = make(batch, heads, groups, torch.float64, requires_grad=True)
    rows, keys = torch.tensor([0, 1, 5, 20, ROWS - 1]), torch.tensor([0, 3, 4, 19, ROWS - 1])
    do = torch.zeros(ROWS, batch, heads, HEAD_DIM, dtype=torch.float64)
    do[rows] = torch.randn(len(rows), batch, heads, HEAD_DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    o = written_out(q, k, v)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do.flatten(2))

    found = attention_reference(q, k, v, do[rows], rows, keys, SCALE)
    for name, expected in (("o", o.unflatten(2, (heads, HEAD_DIM))[rows]), ("dq", dq[rows]), ("dk", dk[keys]), ("dv", dv[keys])):
        torch.testing.assert_close(found[name].value, expected.detach(), rtol=1e-12, atol=1e-13)
        assert (found[name].magnitude > 0).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_sdpa_returns_the_storage_that_autograd_saved(batch):
    o = backends.sdpa_attention(*make(batch, 4, 2, torch.float32, requires_grad=True), SCALE)
    node = o.grad_fn
    while not hasattr(node, "_saved_output"):
        node = node.next_functions[0][0]
    assert node._saved_output.data_ptr() == o.data_ptr()
    assert o.is_contiguous()


def test_sdpa_hands_the_kernel_views_of_its_inputs():
    tensors = make(2, 4, 2, torch.float32, requires_grad=True)
    node = backends.sdpa_attention(*tensors, SCALE).grad_fn
    while not hasattr(node, "_saved_query"):
        node = node.next_functions[0][0]
    saved = (node._saved_query, node._saved_key, node._saved_value)
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_sdpa_refuses_what_only_the_math_kernel_takes():
    q, k, v = make(1, 4, 4, torch.float32)
    with pytest.raises(AttentionError, match=r"\[s, s\] matrix.*--memo-attention host"):
        backends.sdpa_attention(q, k, v[..., :8], SCALE)


@pytest.mark.parametrize("change", ["rows", "heads"])
def test_shapes_that_are_not_causal_self_attention_are_refused(change):
    q, k, v = make(1, 4, 4, torch.float32)
    k, v = (k[1:], v[1:]) if change == "rows" else (k[:, :, :3], v[:, :, :3])
    with pytest.raises(AttentionError, match=r"found q \[37, 1, 4, 16\], k \["):
        backends.sdpa_attention(q, k, v, SCALE)


class FakeKernel(types.ModuleType):
    """Stands for flash_attn.cute: remembers how it was called and returns rows whose value is their head."""

    def __init__(self):
        super().__init__("flash_attn.cute")
        self.calls = []

    def flash_attn_func(self, q, k, v, **options):
        self.calls.append((q, k, v, options))
        self.o = torch.arange(q.shape[2], dtype=q.dtype)[:, None].expand(q.shape).clone(memory_format=torch.contiguous_format)
        return self.o, None


@pytest.fixture
def fake_kernel(monkeypatch):
    kernel = FakeKernel()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", kernel)
    return kernel


@pytest.mark.parametrize("batch", [1, 2])
def test_fa4_is_called_on_views_causal_and_without_a_window(fake_kernel, batch):
    q, k, v = make(batch, 4, 2, torch.bfloat16)
    o = backends._fa4(q, k, v, SCALE)
    (*given, options), = fake_kernel.calls
    assert options == {"softmax_scale": SCALE, "causal": True}
    assert [list(tensor.shape) for tensor in given] == [[batch, ROWS, width, HEAD_DIM] for width in (4, 2, 2)]
    assert [tensor.data_ptr() for tensor in given] == [tensor.data_ptr() for tensor in (q, k, v)]
    assert o.shape == (ROWS, batch, 4 * HEAD_DIM)
    assert o.data_ptr() == fake_kernel.o.data_ptr()
    assert o.is_contiguous() == (batch == 1)
    assert torch.equal(o[0, 0], torch.arange(4, dtype=o.dtype).repeat_interleave(HEAD_DIM))


def test_fa4_refuses_a_cpu_and_float32(fake_kernel):
    with pytest.raises(AttentionError, match="found torch.float32 on cpu.*--memo-attention sdpa"):
        backends.fa4_attention(*make(1, 4, 4, torch.float32), SCALE)
    assert fake_kernel.calls == []


def test_a_missing_fa4_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    with pytest.raises(AttentionError, match="pip install flash-attn-4.*--memo-attention sdpa or host"):
        backends.make_backend("fa4", scale=SCALE)
    assert backends.available("sdpa") is None and backends.available("host") is None


def test_the_module_loads_and_sdpa_runs_where_fa4_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    spec = importlib.util.spec_from_file_location("megatron_memo.attention.loaded_again", backends.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.make_backend("sdpa", scale=SCALE)(*make(1, 4, 4, torch.float32)).shape == (ROWS, 1, 4 * HEAD_DIM)


def test_megatrons_own_attention_is_not_made_here():
    with pytest.raises(ConfigError, match="expected fa4 or sdpa"):
        backends.make_backend("host", scale=SCALE)


def test_descriptions_carry_versions_and_what_steers_the_choice(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setattr(backends, "_version", lambda package: {"flash-attn-4": "4.0.0b36", "transformer-engine": "2.20.2"}.get(package))
    assert backends.describe("fa4") == "flash-attn-4 4.0.0b36"
    assert f"torch {torch.__version__}" in backends.describe("sdpa")
    for part in ("transformer-engine 2.20.2", "flash-attn-4 4.0.0b36", "NVTE_FUSED_ATTN=0"):
        assert part in backends.describe("host")
