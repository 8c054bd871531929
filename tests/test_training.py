"""Whole runs of pretrain_gpt.py on real text, stock against --memo, with no GPU."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="megatron-core is not installed")
ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --micro-batch-size 2 --global-batch-size 4 "
    f"--train-iters {STEPS} --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --split 90,5,5 --no-create-attention-mask-in-dataloader "
    "--log-interval 1 --eval-interval 10 --eval-iters 1 --memo-cpu"
)
MEMO = "--memo --memo-alpha 0.5 --memo-keep 0.2 --memo-tiles 3"


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("corpus") / "python"
    subprocess.run([sys.executable, str(ROOT / "scripts/prepare_corpus.py"), "--output", str(prefix)], check=True, capture_output=True, timeout=300)
    return prefix


def train(corpus, flags, world=1, expect=0):
    """Losses by step, losses of evaluations, and the whole output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MASTER_PORT": str(free_port())}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    start = [sys.executable] if world == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    command = [*start, str(ROOT / "pretrain_gpt.py"), *MODEL.split(), "--data-path", str(corpus), *flags.split()]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    output = run.stdout + run.stderr
    assert (run.returncode == 0) == (expect == 0), output[-4000:]
    losses = [float(x) for x in re.findall(r"iteration +\d+/.*?lm loss: ([-+.\deE]+)", output)]
    evaluations = [float(x) for x in re.findall(r"validation loss at .*?lm loss value: ([-+.\deE]+)", output)]
    return losses, evaluations, output


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


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--memo-alpha 1.5", "--memo-alpha is a fraction of tokens: expected 0 to 1, found 1.5"),
        ("--memo-alpha 0.7 --memo-keep 0.7", "their sum is 1.4"),
        ("--memo-tiles 0", "--memo-tiles: expected at least 1 tile, found 0"),
        ("--memo --hidden-dropout 0.1", "--hidden-dropout"),
        ("--memo --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "--recompute-granularity"),
        ("--memo --memo-alpha 1 --memo-host-gib 0.0001", "GiB of host memory"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step_with_one_message(corpus, flags, message):
    losses, _, output = train(corpus, flags, expect=1)
    assert losses == []
    assert message in output
    assert "Traceback" not in output
