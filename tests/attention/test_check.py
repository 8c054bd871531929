"""The attention check passes what is right and fails what is wrong, however few rows are."""

import json
import types
import warnings

import pytest
import torch

from megatron_memo.attention import check, verdict_cache
from megatron_memo.attention.backends import describe, make_backend
from megatron_memo.attention.cases import marks_of_small
from megatron_memo.errors import AttentionError

SEQ = 192
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPE = dict(batch=2, heads=4, groups=2, head_dim=16, device="cpu")
SCALE = SHAPE["head_dim"] ** -0.5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def attention(q, k, v, mask, scale=SCALE, interleaved=True):
    """o by plain torch in the dtype of q, scores rounded to it; ``mask`` [s, s] is true where a row sees a key."""
    shared = q.shape[2] // k.shape[2]
    repeat = (lambda t: t.repeat_interleave(shared, dim=2)) if interleaved else (lambda t: t.repeat(1, 1, shared, 1))
    scores = torch.einsum("sbhd,tbhd->bhst", q, repeat(k)) * scale
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), repeat(v)).flatten(2)


def causal(seq):
    return torch.ones(seq, seq, dtype=torch.bool).tril()


def right(q, k, v):
    return attention(q, k, v, causal(len(q)))


def masked(change):
    """Attention whose causal mask is ``change``d: a function of mask, row positions [s, 1] and key positions [s]."""

    def attend(q, k, v):
        positions = torch.arange(len(q))
        return attention(q, k, v, change(causal(len(q)), positions[:, None], positions))

    return attend


class Gradient(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient.clone()), None


def with_gradient(which, change):
    def attend(*tensors):
        return right(*(Gradient.apply(tensor, change) if name == which else tensor for name, tensor in zip("qkv", tensors)))

    return attend


def rows(start, stop, change):
    def changed(tensor):
        tensor[start:stop] = change(tensor[start:stop])
        return tensor

    return changed


def fill(value):
    def attend(q, k, v):
        o = right(q, k, v)
        return torch.where(torch.zeros_like(o, dtype=torch.bool), o, torch.full_like(o, value))

    return attend


def one_nan(q, k, v):
    o = right(q, k, v).clone()
    o[100, 1, 5] = float("nan")
    return o


WRONG = {
    "no mask": masked(lambda mask, row, key: torch.ones_like(mask)),
    "sees one row of the future": masked(lambda mask, row, key: key <= row + 1),
    "window of 1": masked(lambda mask, row, key: mask & (key > row - 1)),
    "window of 64": masked(lambda mask, row, key: mask & (key > row - 64)),
    "window of s - 64": masked(lambda mask, row, key: mask & (key > row - SEQ + 64)),
    "window of s - 1": masked(lambda mask, row, key: mask & (key > row - SEQ + 1)),
    "does not see itself, but for row 0": masked(lambda mask, row, key: mask & ((key < row) | (row == 0))),
    "the last 3 rows see half": masked(lambda mask, row, key: mask & ((row < SEQ - 3) | (key < SEQ // 2))),
    "the last row does not see itself": masked(lambda mask, row, key: mask & ((row < SEQ - 1) | (key < SEQ - 1))),
    "the last row misses the block before it": masked(lambda mask, row, key: mask & ((row < SEQ - 1) | (key < SEQ - 128) | (key >= SEQ - 64))),
    "groups taken in turn": lambda q, k, v: attention(q, k, v, causal(len(q)), interleaved=False),
    "no scale": lambda q, k, v: attention(q, k, v, causal(len(q)), scale=1.0),
    "scale of another head size": lambda q, k, v: attention(q, k, v, causal(len(q)), scale=SHAPE["head_dim"] ** -0.4),
    "samples swapped": lambda q, k, v: right(q, k, v).flip(1),
    "zeros": fill(0.0),
    "NaN": fill(float("nan")),
    "one NaN": one_nan,
    "dv a tenth too large": with_gradient("v", lambda gradient: gradient * 1.1),
    "dv of the other group": with_gradient("v", lambda gradient: gradient.flip(2)),
    "dv of the last key is zero": with_gradient("v", rows(-1, None, torch.zeros_like)),
    "dk of the last 3 keys is zero": with_gradient("k", rows(-3, None, torch.zeros_like)),
    "dk of one head only": with_gradient("k", lambda gradient: gradient * 0.5),
    "dq of the last row has the wrong sign": with_gradient("q", rows(-1, None, torch.neg)),
    "dq is NaN in row 7": with_gradient("q", rows(7, 8, lambda gradient: gradient * float("nan"))),
}


def tried(attend, dtype, **options):
    return check.check_small(attend, **{**SHAPE, "dtype": dtype, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [dict(), dict(batch=1, groups=4), dict(groups=1), dict(batch=1, head_dim=128), dict(seq=77), dict(scale=0.01)], ids=str
)
def test_right_attention_passes(dtype, shape):
    scale = shape.get("scale", shape.get("head_dim", SHAPE["head_dim"]) ** -0.5)
    for attend in (make_backend("sdpa", scale=scale), lambda q, k, v: attention(q, k, v, causal(len(q)), scale)):
        verdict = tried(attend, dtype, **shape)
        assert verdict.passed, verdict
        assert {difference.tensor for difference in verdict.differences} == {"o", "dq", "dk", "dv"}
        check.require(verdict, "torch")


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_attention_fails(wrong, dtype):
    verdict = tried(WRONG[wrong], dtype)
    assert verdict.failure is None
    assert not verdict.passed
    # Not by a hair: what rounding may do is far from what a fault does.
    assert verdict.worst.found > 1.5 * verdict.worst.allowed


@pytest.mark.parametrize("mark", marks_of_small(SEQ))
def test_one_marked_key_that_one_row_misses_shows_in_bfloat16(mark):
    for row_that_misses in {mark, SEQ - 1} - {0}:
        attend = masked(lambda mask, row, key: mask & ~((row == row_that_misses) & (key == mark)))
        assert not tried(attend, torch.bfloat16).passed, (row_that_misses, mark)


@pytest.mark.parametrize("which,tensor", [("q", "dq"), ("k", "dk"), ("v", "dv")])
def test_the_tensor_that_is_wrong_is_named(which, tensor):
    verdict = tried(with_gradient(which, rows(150, 151, lambda gradient: -gradient)), torch.float32)
    assert {difference.tensor for difference in verdict.differences if difference.found > difference.allowed} == {tensor}
    assert verdict.worst.measure.startswith("row 150 of sample")


def test_megatrons_own_attention_passes(monkeypatch):
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    buffer = types.SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(dot_product_attention.parallel_state, "get_global_memory_buffer", lambda: buffer)
    one_rank = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))
    for dtype in (torch.bfloat16, torch.float32):
        config = TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, masked_softmax_fusion=False,
            bf16=dtype == torch.bfloat16, params_dtype=dtype,
        )
        core = dot_product_attention.DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=one_rank)
        core.config.sequence_parallel = True  # No tracker of CUDA's random states around a dropout of nothing.
        # It is given a mask because it would make its own on the GPU.
        verdict = tried(lambda q, k, v: core(q, k, v, ~causal(len(q)), attn_mask_type=AttnMaskType.causal), dtype)
        assert verdict.passed, verdict


def test_random_states_are_as_before():
    torch.manual_seed(5)
    before = torch.get_rng_state()

    def attend(q, k, v):
        torch.rand(7)
        return right(q, k, v)

    assert tried(attend, torch.float32).passed
    assert torch.equal(torch.get_rng_state(), before)


def test_the_check_runs_under_no_grad_too():
    with torch.no_grad():
        assert tried(right, torch.float32).passed


def test_the_error_names_backend_tensor_difference_and_what_to_do():
    verdict = tried(WRONG["window of 1"], torch.bfloat16)
    with pytest.raises(AttentionError) as raised:
        check.require(verdict, "flash-attn-4 4.0.0b36")
    message = str(raised.value)
    worst = verdict.worst
    numbers = (f"{worst.found:.2e}", f"{worst.allowed:.2e}")
    shape = ("192 rows, batch 2, 4 heads over 2 groups", "bfloat16 on cpu")
    for part in ("flash-attn-4 4.0.0b36", worst.tensor, worst.measure, *numbers, *shape, "--memo-attention (host, fa4 or sdpa)"):
        assert part in message


def test_a_kernel_that_raises_fails_with_its_own_words():
    def attend(q, k, v):
        raise ValueError("head size 16 is not supported")

    verdict = tried(attend, torch.float32)
    assert not verdict.passed
    with pytest.raises(AttentionError, match="some kernel 1.0 could not be checked.*ValueError: head size 16 is not supported") as raised:
        check.require(verdict, "some kernel 1.0")
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "attend,words",
    [
        (lambda q, k, v: right(q, k, v).unflatten(2, (4, 16)), r"expected a result \[192, 2, 64\].*found \[192, 2, 4, 16\]"),
        (lambda q, k, v: right(q, k, v).double(), "found .* of torch.float64"),
        (lambda q, k, v: (right(q, k, v), None), "found tuple"),
        (lambda q, k, v: right(q, k, v).detach(), "could not be checked"),
    ],
    ids=["four dimensions", "another dtype", "a tuple", "no gradient"],
)
def test_a_result_of_another_form_fails(attend, words):
    with pytest.raises(AttentionError, match=words):
        check.require(tried(attend, torch.float32), "some kernel 1.0")


def test_heads_that_groups_do_not_divide_are_refused():
    with pytest.raises(AttentionError, match="4 heads, 3 groups"):
        tried(right, torch.float32, groups=3)


# Full length: the same at a small size, with the threshold lowered.

LONG = dict(SHAPE, seq=700, dtype=torch.float32, description="torch 1", min_elements=1)


class Counted:
    def __init__(self, attend):
        self.attend, self.calls = attend, 0

    def __call__(self, q, k, v):
        self.calls += 1
        return self.attend(q, k, v)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_memo" / "attention.json"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [dict(), dict(batch=1, groups=4, head_dim=64), dict(groups=1, seq=1500)], ids=str)
def test_right_attention_passes_at_full_length(cache, dtype, shape):
    attend = make_backend("sdpa", scale=shape.get("head_dim", SHAPE["head_dim"]) ** -0.5)
    verdict = check.check_long(attend, **{**LONG, "dtype": dtype, **shape})
    assert verdict.passed and verdict.source == "measured", verdict


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        masked(lambda mask, row, key: torch.ones_like(mask)),
        masked(lambda mask, row, key: mask & (key > row - len(mask) + 64)),
        masked(lambda mask, row, key: mask & ((row < len(mask) - 3) | (key < len(mask) // 2))),
        masked(lambda mask, row, key: mask & ((row < len(mask) - 1) | (key < len(mask) - 1))),
        with_gradient("v", rows(-3, None, torch.zeros_like)),
        with_gradient("k", rows(0, 1, torch.zeros_like)),
        with_gradient("q", rows(500, None, torch.zeros_like)),
        one_nan,
    ],
    ids=["no mask", "window", "last 3 rows see half", "last row misses itself", "dv of 3 keys", "dk of key 0", "dq from row 500", "one NaN"],
)
def test_wrong_attention_fails_at_full_length_and_is_not_remembered(cache, wrong, dtype):
    # The NaN is in a row that is sampled.
    verdict = check.check_long(wrong, **{**LONG, "dtype": dtype, "seq": 1701 if wrong is one_nan else 700})
    assert verdict.failure is None and not verdict.passed
    assert not cache.exists()


def test_below_the_threshold_nothing_is_run(cache):
    attend = Counted(right)
    verdict = check.check_long(attend, **{**LONG, "min_elements": 700 * 2 * 4 * 16})
    assert verdict.passed and verdict.source == "not needed" and attend.calls == 0
    check.require(verdict, "torch 1")
    assert not cache.exists()


def test_the_default_threshold_is_what_32_bit_indices_hold():
    assert check.LONG_ELEMENTS == 2**31


def test_a_passed_check_is_made_once(cache):
    attend, lines = Counted(right), []
    first = check.check_long(attend, announce=lines.append, **LONG)
    second = check.check_long(attend, announce=lines.append, **LONG)
    assert (first.source, second.source, attend.calls) == ("measured", "remembered", 1)
    assert second.differences == first.differences
    assert len(lines) == 1 and "torch 1" in lines[0] and "700 rows" in lines[0]
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize(
    "change",
    [
        dict(description="torch 2"), dict(dtype=torch.float64), dict(seq=701), dict(batch=1), dict(groups=1), dict(heads=2), dict(head_dim=8),
        dict(scale=0.3),
    ],
    ids=str,
)
def test_another_shape_or_version_is_checked_anew(cache, change):
    check.check_long(make_backend("sdpa", scale=SCALE), **LONG)
    changed = {**LONG, **change}
    attend = Counted(make_backend("sdpa", scale=changed.get("scale", changed["head_dim"] ** -0.5)))
    assert check.check_long(attend, **changed).source == "measured"
    assert attend.calls == 1


def test_another_version_of_this_package_checks_anew(cache, monkeypatch):
    check.check_long(right, **LONG)
    monkeypatch.setattr(verdict_cache, "__version__", "another")
    assert check.check_long(right, **LONG).source == "measured"


def test_a_smaller_tolerance_than_the_remembered_one_is_checked_anew(cache):
    check.check_long(right, **LONG)
    verdict = check.check_long(right, tolerance=check.Tolerance(1e-12, 1e-12), **LONG)
    assert verdict.source == "measured" and not verdict.passed


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "entries": [1]}', '{"format": 1, "entries": {"a": 1}}', "\x00\xff"])
def test_a_corrupted_cache_is_ignored_with_a_warning_and_written_anew(cache, text):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match="attention.json is not readable"):
        verdict = check.check_long(right, **LONG)
    assert verdict.passed and verdict.source == "measured"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check.check_long(right, **LONG).source == "remembered"


def test_a_corrupted_record_is_checked_anew(cache):
    check.check_long(right, **LONG)
    stored = json.loads(cache.read_text())
    for record in stored["entries"].values():
        record["differences"] = [["o"]]
    cache.write_text(json.dumps(stored))
    assert check.check_long(right, **LONG).source == "measured"


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert check.check_long(right, **LONG).passed


def test_what_others_remembered_is_kept(cache):
    check.check_long(right, **LONG)
    check.check_long(make_backend("sdpa", scale=SCALE), **{**LONG, "description": describe("sdpa")})
    assert len(json.loads(cache.read_text())["entries"]) == 2
