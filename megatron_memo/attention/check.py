"""Is this attention right? A kernel is compared with a float64 reference before it is trusted with a training run.

    require(check_small(attend, batch=1, heads=4, groups=4, head_dim=128, dtype=torch.bfloat16, device="cuda"), describe("fa4"))
    require(check_long(attend, seq=1 << 23, ..., description=describe("fa4")), describe("fa4"))

``attend(q, k, v)`` is any callable from q [s, b, heads, d], k and v [s, b, groups, d] to o [s, b, heads * d], differentiable, causal.

Why: a kernel can be wrong and train. TransformerEngine 2.20.2 hands flash-attn-4 4.0.0b36 a window (-1, 0) for a causal mask, which that release
reads as a window: almost nothing was attended, fast, with plausible norms.

What is compared: o, dq, dk and dv, each as a whole (norm of the difference over the reference's norm: a wrong scale, a biased sum) and row by
row (the worst one: a mask that is wrong for few rows). A row is one sample's, one head's vector at one position; its difference is
measured in its magnitude (see :class:`~megatron_memo.attention.reference.Rows`). Inputs carry marked keys (see
:mod:`~megatron_memo.attention.cases`) of which every row must see exactly those up to itself: one missed or seen early moves
a row by a fifth or more of its magnitude.

Memory: the small check takes a few hundred MiB for usual shapes. The long one holds what attention itself needs (q, k, v, o, do, dq, dk, dv
and the kernel's own) at its peak, and q, k, v and some 400 MiB while comparing. Both free what they took; torch's allocator keeps it cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..errors import AttentionError, MemoError
from . import verdict_cache
from .backends import Attend
from .cases import Case, make_inputs, marks_of_long, marks_of_small
from .reference import Rows, attention_reference

LONG_ELEMENTS = 1 << 31
_SMALL_ROWS = {"cuda": 640, "cpu": 192}


class Tolerance(NamedTuple):
    """How far o, dq, dk, dv may be from the reference: as a whole (over its norm), and the worst row (over its magnitude)."""

    whole: float
    row: float


class Difference(NamedTuple):
    """One comparison: ``tensor`` ("o", "dq", "dk", "dv"), ``measure`` ("as a whole" or the worst row's place), found and allowed."""

    tensor: str
    measure: str
    found: float
    allowed: float


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        case: the shape that was tried, in words.
        differences: eight comparisons, two a tensor; empty if the kernel failed or nothing was tried.
        source: "measured", "remembered" (an earlier check on this machine) or "not needed".
        failure: why the kernel gave nothing to compare, or None.
        cause: the exception behind ``failure``, or None.
    """

    case: str
    differences: Tuple[Difference, ...] = ()
    source: str = "measured"
    failure: Optional[str] = None
    cause: Optional[BaseException] = None

    @property
    def passed(self) -> bool:
        return self.failure is None and all(difference.found <= difference.allowed for difference in self.differences)

    @property
    def worst(self) -> Optional[Difference]:
        """The comparison that is furthest up to, or over, what is allowed."""
        return max(self.differences, key=lambda difference: difference.found / difference.allowed, default=None)


def tolerance_of(dtype: torch.dtype, device: torch.device) -> Tolerance:
    """What rounding explains, with a factor to spare, and below what one missed marked key does (0.18 of a row; 0.094 is allowed in bfloat16).

    float16, bfloat16: sums are in float32; a kernel rounds probabilities and dS once each, and o, dq, dk, dv once more, by half an epsilon
    at most. One that also holds scores in the dtype (Megatron's own, unfused) adds half an epsilon times a score, up to 10 here, to each
    probability.
    The worst of many thousand rows is at 2 (4 with 8 elements a head) and at 6 epsilon, whole tensors at 1 to 2: 12 and 4 are allowed.
    float32, float64: sums round like the square root of their length. Worst rows are at 60 epsilon, whole tensors at 15: 256 and 64 are allowed.
    float32 on a GPU counts with TF32's epsilon, 2^-10: whether products may run in TF32 is the user's choice.
    """
    epsilon = torch.finfo(dtype).eps
    if dtype in (torch.float16, torch.bfloat16):
        return Tolerance(4 * epsilon, 12 * epsilon)
    if dtype == torch.float32 and device.type == "cuda":
        return Tolerance(4 * 2.0**-10, 12 * 2.0**-10)
    return Tolerance(64 * epsilon, 256 * epsilon)


def small_rows(device: torch.device) -> int:
    """Rows of the small check: five of a kernel's usual blocks on a GPU."""
    return _SMALL_ROWS.get(device.type, _SMALL_ROWS["cpu"])


def check_small(
    attend: Attend, *, batch: int, heads: int, groups: int, head_dim: int, dtype: torch.dtype, device: Union[torch.device, str],
    scale: Optional[float] = None, seq: Optional[int] = None, tolerance: Optional[Tolerance] = None,
) -> Verdict:
    """Compares ``attend`` with the reference on every row of a short sequence.

    Args:
        heads, groups: of this rank; batch: micro-batch size.
        scale: factor of q k^T that ``attend`` uses; None is head_dim ** -0.5.
        seq: rows; None is 640 on a GPU (five of a kernel's usual blocks), 192 elsewhere.
        tolerance: None is :func:`tolerance_of`.

    Torch's random states are as before. A kernel that raises gives a failed verdict; errors of megatron_memo and out-of-memory errors pass through.
    """
    case = _case(seq, batch, heads, groups, head_dim, dtype, device, scale)
    rows = torch.arange(case.seq, device=case.device)
    return _compare(attend, case, marks_of_small(case.seq), rows, rows, tolerance)


def check_long(
    attend: Attend, *, seq: int, batch: int, heads: int, groups: int, head_dim: int, dtype: torch.dtype, device: Union[torch.device, str],
    description: str, scale: Optional[float] = None, tolerance: Optional[Tolerance] = None, min_elements: int = LONG_ELEMENTS,
    announce: Optional[Callable[[str], None]] = None,
) -> Verdict:
    """Compares ``attend`` with the reference on sampled rows at full length, if a tensor has more than ``min_elements`` elements.

    Compared: o and dq around some thirty positions (the ends, sixteen between, where indices pass 2^30, 2^31 and 2^32), and dk and dv of
    those positions. The output gradient is zero but for the sampled rows, which makes dk and dv exact from them alone; so a backward pass
    that loses the contribution of rows that are not sampled is not seen. Costs one forward and backward pass of ``attend``, and three reads
    of k and v.

    Args:
        description: the backend with its versions (:func:`~megatron_memo.attention.backends.describe`). A check that has passed with it, on
            this device, these libraries and this shape is not repeated: source is "remembered".
        announce: called with one line before a check is made.
        The others: as for :func:`check_small`.

    Do not give it a collective ``attend``: processes may differ in what they remember.
    """
    case = _case(seq, batch, heads, groups, head_dim, dtype, device, scale)
    if case.elements <= min_elements:
        return Verdict(str(case), source="not needed")
    allowed = tolerance or tolerance_of(case.dtype, case.device)
    key = verdict_cache.key_of(case, description)
    remembered = _recall(case, key, allowed)
    if remembered is not None:
        return remembered
    if announce is not None:
        announce(f"checking attention at full length, once on this machine: {description}, {case}")
    marks = marks_of_long(case)
    keys = torch.tensor(marks, device=case.device)
    around = {row for mark in marks for row in (mark - 1, mark, mark + 1) if 0 <= row < seq}
    verdict = _compare(attend, case, marks, torch.tensor(sorted(around), device=case.device), keys, allowed)
    if verdict.passed:
        verdict_cache.remember(key, {"differences": [list(difference) for difference in verdict.differences]})
    return verdict


def require(verdict: Verdict, backend_description: str) -> None:
    """Raises AttentionError unless ``verdict`` passed: it names the backend, its version, the tensor, the difference and what to do."""
    if verdict.passed:
        return
    if verdict.failure is not None:
        problem = f"could not be checked on {verdict.case}: {verdict.failure}."
    else:
        worst = verdict.worst
        problem = (
            f"is wrong on {verdict.case}: {worst.tensor}, {worst.measure}, is off by {worst.found:.2e} against a float64 reference, at most "
            f"{worst.allowed:.2e} is allowed. All: {_listed(verdict.differences)}."
        )
    raise AttentionError(
        f"Attention backend {backend_description} {problem} Nothing has been trained. Take another --memo-attention (host, fa4 or sdpa), or another "
        "version of this backend."
    ) from verdict.cause


def _case(seq, batch, heads, groups, head_dim, dtype, device, scale) -> Case:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if min(batch, heads, groups, head_dim) < 1 or heads % groups:
        raise AttentionError(
            f"attention check: expected a head count that the group count divides, found {heads} heads, {groups} groups, batch {batch}, "
            f"{head_dim} elements a head."
        )
    seq = seq if seq is not None else small_rows(device)
    return Case(seq, batch, heads, groups, head_dim, dtype, device, scale if scale is not None else head_dim**-0.5)


def _compare(attend: Attend, case: Case, marks: Sequence[int], rows: Tensor, keys: Tensor, tolerance: Optional[Tolerance]) -> Verdict:
    q, k, v, generator = make_inputs(case, marks)
    do = torch.randn((len(rows), case.batch, case.heads, case.head_dim), generator=generator, dtype=case.dtype, device=case.device)
    try:
        found = _run(attend, case, q, k, v, do, rows, keys)
    except (MemoError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return Verdict(str(case), failure=f"{type(error).__name__}: {error}", cause=error)
    if isinstance(found, str):
        return Verdict(str(case), failure=found)
    expected = attention_reference(q, k, v, do, rows, keys, case.scale)
    allowed = tolerance or tolerance_of(case.dtype, case.device)
    differences: List[Difference] = []
    for name, reference in expected.items():
        differences += _differences(name, found[name], reference, rows if name in ("o", "dq") else keys, allowed)
    return Verdict(str(case), tuple(differences))


def _run(attend: Attend, case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: Tensor, keys: Tensor) -> Union[Dict[str, Tensor], str]:
    """The sampled rows of o, dq, dk, dv, or what is wrong with the output. Whole tensors are gone on return, random states as before."""
    with torch.random.fork_rng(devices=[case.device] if case.device.type == "cuda" else []), torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        o = attend(*inputs)
        expected = (case.seq, case.batch, case.heads * case.head_dim)
        if not isinstance(o, Tensor) or tuple(o.shape) != expected or o.dtype != case.dtype:
            what = f"{list(o.shape)} of {o.dtype}" if isinstance(o, Tensor) else type(o).__name__
            return f"expected a result {list(expected)} of {case.dtype}, found {what}"
        rows_of_o = o.detach()[rows].unflatten(2, (case.heads, case.head_dim))
        d_output = torch.zeros(expected, dtype=case.dtype, device=case.device)
        d_output[rows] = do.flatten(2)
        dq, dk, dv = torch.autograd.grad(o, inputs, d_output)
        return {"o": rows_of_o, "dq": dq[rows], "dk": dk[keys], "dv": dv[keys]}


def _differences(name: str, found: Tensor, expected: Rows, positions: Tensor, allowed: Tolerance) -> List[Difference]:
    error = found.double().sub_(expected.value)
    rows = error.norm(dim=-1) / expected.magnitude.clamp_min(torch.finfo(torch.float64).tiny)
    rows.nan_to_num_(nan=math.inf)
    worst = int(rows.argmax())
    row, sample, head = (int(i) for i in torch.unravel_index(torch.tensor(worst), rows.shape))
    place = f"row {int(positions[row])} of sample {sample}, {'head' if name in ('o', 'dq') else 'group'} {head}"
    whole = (error.norm() / expected.value.norm()).item()
    return [
        Difference(name, "as a whole", whole if math.isfinite(whole) else math.inf, allowed.whole),
        Difference(name, place, rows.flatten()[worst].item(), allowed.row),
    ]


def _recall(case: Case, key: str, allowed: Tolerance) -> Optional[Verdict]:
    record = verdict_cache.recall(key)
    if record is None:
        return None
    try:
        differences = tuple(
            Difference(str(tensor), str(measure), float(found), allowed.whole if measure == "as a whole" else allowed.row)
            for tensor, measure, found, _ in record["differences"]
        )
    except (KeyError, TypeError, ValueError):
        return None
    verdict = Verdict(str(case), differences, source="remembered")
    # Judged anew: a smaller tolerance than the one it was kept with may be asked for.
    return verdict if differences and verdict.passed else None


def _listed(differences: Sequence[Difference]) -> str:
    tensors = dict.fromkeys(difference.tensor for difference in differences)
    return ", ".join(f"{tensor} {' and '.join(f'{d.found:.1e}' for d in differences if d.tensor == tensor)}" for tensor in tensors)
