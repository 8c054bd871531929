"""Whole runs of pretrain_gpt.py on real text, stock against --memo, with no GPU."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="megatron-core is not installed")
sys.path.insert(0, str(Path(__file__).parent))
from training_runs import MEMO, STEPS, make_corpus, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "python")


def assert_same_curve(stock, memo):
    assert len(stock[0]) == len(memo[0]) == STEPS and len(stock[1]) == len(memo[1]) >= 3
    for expected, found in zip(stock[0] + stock[1], memo[0] + memo[1]):
        assert abs(found - expected) < 1e-5 * expected


def test_twenty_steps_in_float32_have_stocks_losses(corpus, tmp_path):
    stock = train(corpus, "")
    memo = train(corpus, f"{MEMO} --memo-report {tmp_path}")
    assert_same_curve(stock, memo)
    assert stock[0][-1] < stock[0][0] - 0.5  # it learns
    report = json.loads((tmp_path / "report.rank0.json").read_text())
    assert [step["iteration"] for step in report["steps"]] == list(range(1, STEPS + 1))
    assert all(step["time_ms"] > 0 for step in report["steps"])
    # Megatron's line on step 2 is the mean of steps 1 and 2.
    logged = [memo[0][0], 2 * memo[0][1] - memo[0][0], *memo[0][2:]]
    for step, loss in zip(report["steps"], logged):
        assert abs(step["loss"] - loss) < 1e-5 * loss
    assert min(report[key] for key in ("swapped_bytes", "kept_bytes", "recomputed_bytes", "host_peak_bytes")) > 0
    assert "self-check against stock: one tile: largest difference 0.0e+00 of 0.0e+00 allowed" in memo[2]


def test_tensor_and_sequence_parallel_ranks_have_stocks_losses(corpus):
    parallel = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert_same_curve(train(corpus, parallel, world=2), train(corpus, f"{parallel} {MEMO}", world=2))


def test_with_dropout_one_tile_has_stocks_losses_to_the_last_digit(corpus):
    dropout = "--hidden-dropout 0.1 --attention-dropout 0.1"
    stock, memo = train(corpus, dropout), train(corpus, f"{dropout} --memo --memo-alpha 0 --memo-tiles 1")
    assert len(stock[0]) == STEPS and stock[:2] == memo[:2]
    assert stock[:2] != train(corpus, "")[:2]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--memo-alpha 1.5", "--memo-alpha is a fraction of tokens: expected 0 to 1, found 1.5"),
        ("--memo-alpha 0.7 --memo-keep 0.7", "their sum is 1.4"),
        ("--memo-tiles 0", "--memo-tiles: expected at least 1 tile, found 0"),
        ("--memo --memo-attention sdpa --attention-dropout 0.1", "--attention-dropout"),
        ("--memo --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "--recompute-granularity"),
        ("--memo --memo-alpha 1 --memo-host-gib 0.0001", "GiB of host memory"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step_with_one_message(corpus, flags, message):
    losses, _, output = train(corpus, flags, expect=1)
    assert losses == []
    assert message in output
    assert "Traceback" not in output
