"""Whole runs of pretrain_gpt.py on real text, stock against --memo, with no GPU."""

import json
import re
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


PARALLEL = {
    "pipeline": "--pipeline-model-parallel-size 2",
    "interleaved pipeline": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}


@pytest.mark.parametrize("layout", PARALLEL)
def test_two_ranks_have_stocks_losses(corpus, layout):
    flags = f"{PARALLEL[layout]} --global-batch-size 8"
    assert_same_curve(train(corpus, flags, world=2), train(corpus, f"{flags} {MEMO}", world=2))


AROUND = {
    "growing batch": "--rampup-batch-size 2 2 40 --train-samples 80 --global-batch-size 8",
    "clipping, counting, checking": "--clip-grad 0.1 --log-num-zeros-in-grad --log-params-norm --log-throughput --rerun-mode validate_results",
}


@pytest.mark.parametrize("what", AROUND)
def test_what_acts_around_the_layers_has_stocks_losses(corpus, what):
    flags = AROUND[what]
    stock, memo = train(corpus, flags), train(corpus, f"{flags} {MEMO}")
    assert len(stock[0]) == len(memo[0]) >= 10
    assert stock[0] == pytest.approx(memo[0], rel=1e-5) and stock[1] == pytest.approx(memo[1], rel=1e-5)


def test_a_step_that_fp16_skips_is_skipped_with_memo_too(corpus):
    flags = "--fp16 --initial-loss-scale 524288 --hysteresis 1 --accumulate-allreduce-grads-in-fp32"
    (stock, _, output), (memo, _, memo_output) = train(corpus, flags), train(corpus, f"{flags} {MEMO}")
    skipped, memo_skipped = ([int(n) for n in re.findall(r"number of skipped iterations: +(\d+)", text)] for text in (output, memo_output))
    assert skipped == memo_skipped and sum(skipped[:3]) >= 1 and not any(skipped[3:])
    assert stock == pytest.approx(memo, abs=0.02)


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
