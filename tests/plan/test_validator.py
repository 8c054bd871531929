"""The validator finds every way in which a plan can be wrong, also when a true plan was changed by one unit somewhere."""

import dataclasses
import random
import sys
from pathlib import Path

import pytest

from megatron_memo.plan.errors import InvalidPlanError
from megatron_memo.plan.planner import make_plan
from megatron_memo.plan.records import Buffer, Plan, Settings
from megatron_memo.plan.validator import Fault, find_fault, require_valid

sys.path.insert(0, str(Path(__file__).parent))
from traces import overlaps, random_trace  # noqa: E402

PAIR = [Buffer("a", 0, 2, 4), Buffer("b", 1, 3, 4)]


def plan(offsets, peak=8, bound=8, proven=8, alignment=1):
    return Plan(tuple(offsets), peak, bound, proven, "hand", 0, True, 0.0, alignment)


def test_a_right_plan_has_no_fault():
    assert find_fault(PAIR, plan([0, 4])) is None
    assert find_fault(PAIR, plan([4, 0]), capacity_bytes=8) is None


@pytest.mark.parametrize(
    "wrong, fault",
    [
        (plan([0]), Fault.COUNT),
        (plan([0, 4, 8]), Fault.COUNT),
        (plan([-4, 4]), Fault.NEGATIVE),
        (plan([0, 5], peak=9, alignment=4), Fault.ALIGNMENT),
        (plan([0, 4], alignment=0), Fault.ALIGNMENT),
        (plan([0, 3], peak=7), Fault.OVERLAP),
        (plan([0, 0], peak=4, bound=4), Fault.OVERLAP),
        (plan([0, 4], peak=9), Fault.PEAK),
        (plan([0, 4], peak=7), Fault.PEAK),
        (plan([0, 4], bound=7), Fault.BOUND),
        (plan([0, 5], peak=9, proven=10), Fault.PROOF),
        (plan([0, 5], peak=9, proven=7), Fault.PROOF),
    ],
)
def test_each_way_to_be_wrong_is_told_apart(wrong, fault):
    assert find_fault(PAIR, wrong).fault is fault


def test_a_plan_above_the_capacity_is_a_fault():
    assert find_fault(PAIR, plan([0, 4]), capacity_bytes=7).fault is Fault.CAPACITY


@pytest.mark.parametrize("bad", [Buffer("a", 2, 2, 4), Buffer("a", 3, 2, 4), Buffer("a", 0, 2, 0)])
def test_a_buffer_that_is_none_is_a_fault(bad):
    assert find_fault([bad], plan([0], 4, 4, 4)).fault is Fault.LIFETIME


def test_buffers_that_touch_in_time_or_in_address_do_not_overlap():
    buffers = [Buffer("a", 0, 2, 4), Buffer("b", 2, 3, 4), Buffer("c", 0, 3, 4)]
    assert find_fault(buffers, plan([0, 0, 4])) is None


def test_sizes_count_up_to_the_alignment():
    buffers = [Buffer("a", 0, 2, 3), Buffer("b", 0, 2, 5)]
    assert find_fault(buffers, plan([0, 4], 12, 12, 12, alignment=4)) is None
    assert find_fault(buffers, plan([8, 0], 12, 12, 12, alignment=4)) is None


def test_a_long_buffer_below_many_short_ones_is_still_compared():
    long = Buffer("long", 0, 100, 10)
    short = [Buffer(f"s{n}", n, n + 1, 2) for n in range(100)]
    offsets = [0, *([10] * 99), 9]
    finding = find_fault([long, *short], plan(offsets, 12, 12, 12))
    assert finding.fault is Fault.OVERLAP and "s99" in finding.where and "long" in finding.where


@pytest.mark.parametrize("seed", range(60))
def test_it_agrees_with_comparing_all_pairs_however_offsets_are_changed(seed):
    draw = random.Random(seed)
    buffers = random_trace(seed, 25)
    right = make_plan(buffers, Settings(seconds=5))
    for _ in range(20):
        offsets = list(right.offsets_bytes)
        for index in draw.sample(range(len(offsets)), draw.randint(1, 3)):
            offsets[index] = max(0, offsets[index] + draw.choice([-3, -1, 1, 2, 5]))
        peak = max(offset + buffer.size_bytes for offset, buffer in zip(offsets, buffers))
        changed = dataclasses.replace(right, offsets_bytes=tuple(offsets), peak_bytes=peak, proven_bytes=right.bound_bytes)
        finding = find_fault(buffers, changed)
        wrong = overlaps(buffers, offsets)
        assert (finding is not None and finding.fault is Fault.OVERLAP) == bool(wrong)


def test_a_wrong_plan_is_refused_with_both_buffers_and_the_method():
    with pytest.raises(InvalidPlanError, match=r"found by hand must not be used.*instant 1: b at \[3, 7\), a at \[0, 4\)"):
        require_valid(PAIR, plan([0, 3], peak=7))


def test_it_imports_nothing_that_makes_plans():
    import ast

    import megatron_memo.plan.validator as validator

    tree = ast.parse(Path(validator.__file__).read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    assert ours == {"errors", "records"}
