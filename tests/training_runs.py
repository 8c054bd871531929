"""Whole runs of pretrain_gpt.py with no GPU, for the tests that compare them."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

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


def make_corpus(prefix):
    subprocess.run([sys.executable, str(ROOT / "scripts/prepare_corpus.py"), "--output", str(prefix)], check=True, capture_output=True, timeout=300)
    return prefix


def train(corpus, flags, world=1, expect=0):
    """Losses by step, losses of evaluations, and the whole output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MASTER_PORT": str(free_port())}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    start = [sys.executable] if world == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    model = MODEL.replace(f"--train-iters {STEPS} ", "") if "--train-samples" in flags else MODEL
    command = [*start, str(ROOT / "pretrain_gpt.py"), *model.split(), "--data-path", str(corpus), *flags.split()]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    output = run.stdout + run.stderr
    assert (run.returncode == 0) == (expect == 0), output[-4000:]
    losses = [float(x) for x in re.findall(r"iteration +\d+/.*?lm loss: ([-+.\deE]+)", output)]
    evaluations = [float(x) for x in re.findall(r"validation loss at .*?lm loss value: ([-+.\deE]+)", output)]
    return losses, evaluations, output
