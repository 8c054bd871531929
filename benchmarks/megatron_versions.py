"""A small GPT for some steps on a CPU, stock and with --memo, by the unmodified pretrain_gpt.py of each Megatron-LM checkout that is named.

    python benchmarks/megatron_versions.py --corpus PREFIX --out benchmarks/results/megatron_versions.json CHECKOUT...

PREFIX is what scripts/prepare_corpus.py wrote. Exits 1 when a run fails or losses differ by more than 1e-5 of themselves.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from harness import versions, write_json

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --split 90,5,5 --no-create-attention-mask-in-dataloader --log-interval 1 --eval-interval 10 "
    "--eval-iters 1 --memo-cpu"
)
MEMO = "--memo --memo-alpha 0.5 --memo-keep 0.2 --memo-tiles 3"
# Processes, and the flags that spread the model over them.
LAYOUTS = {"1 rank": (1, ""), "TP2 with sequence parallelism": (2, "--tensor-model-parallel-size 2 --sequence-parallel")}
ALLOWED = 1e-5
_LOSS = re.compile(r"(?:iteration +\d+/.*?lm loss|validation loss at .*?lm loss value): ([-+.\deE]+)")
_START = re.compile(r"megatron_memo \S+: Megatron (\S+) from ")
_TILED = re.compile(r"--memo: (\d+) layers, ")


def train(checkout: Path, corpus: str, steps: int, world: int, flags: str) -> Tuple[List[float], str, float]:
    """Losses of steps and evaluations in order, the whole output, and seconds. Raises RuntimeError with the output's end when the run fails."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={port}", "-m", "megatron_memo.launch"]
    command = [*launch, str(checkout / "pretrain_gpt.py"), *MODEL.split(), "--train-iters", str(steps), "--data-path", corpus, *flags.split()]
    begin = time.perf_counter()
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=checkout)
    output = run.stdout + run.stderr
    if run.returncode != 0:
        raise RuntimeError(output[-3000:])
    return [float(loss) for loss in _LOSS.findall(output)], output, time.perf_counter() - begin


def commit_of(checkout: Path) -> Optional[str]:
    """The commit of a git work tree, None for a folder that is none."""
    run = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--show-prefix", "HEAD"], capture_output=True, text=True)
    prefix, _, commit = run.stdout.partition("\n")
    return commit.strip() if run.returncode == 0 and not prefix else None


def compared(checkout: Path, corpus: str, steps: int, world: int, flags: str) -> Dict[str, Any]:
    """Stock's and --memo's losses, and what says that --memo ran in this Megatron."""
    stock, _, stock_s = train(checkout, corpus, steps, world, flags)
    memo, output, memo_s = train(checkout, corpus, steps, world, f"{flags} {MEMO}")
    if len(stock) != len(memo) or len(stock) < steps:
        raise RuntimeError(f"expected at least {steps} losses of each run, found {len(stock)} of stock's and {len(memo)} of --memo's")
    megatron, tiled = _START.search(output), _TILED.search(output)
    if megatron is None or tiled is None:
        raise RuntimeError("the run with --memo said neither which Megatron it runs nor how many layers it tiles:\n" + output[-3000:])
    return {
        "megatron": megatron[1],
        "tiled_layers_of_rank_0": int(tiled[1]),
        "largest_relative_difference": max(abs(a - b) / abs(a) for a, b in zip(stock, memo)),
        "losses": {"stock": stock, "memo": memo},
        "whole_run_s": {"stock": round(stock_s, 1), "memo": round(memo_s, 1)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT", help="a Megatron-LM work tree; its folder's name is its name in the table")
    parser.add_argument("--corpus", required=True, metavar="PREFIX")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    rows: List[Dict[str, Any]] = []
    for checkout in options.checkouts:
        for layout, (world, flags) in LAYOUTS.items():
            row: Dict[str, Any] = {"checkout": checkout.resolve().name, "commit": commit_of(checkout), "layout": layout}
            try:
                row.update(compared(checkout.resolve(), str(Path(options.corpus).resolve()), options.steps, world, flags))
                row["same"] = row["largest_relative_difference"] <= ALLOWED
            except RuntimeError as error:
                print(error, file=sys.stderr)
                row.update(same=False, failed=True)
            rows.append(row)
            found = f"{row['largest_relative_difference']:.1e}" if "losses" in row else "failed"
            print(f"{row['checkout']:<16} {row.get('megatron', '?'):<12} {layout:<30} {found:>8}  {'same' if row['same'] else 'DIFFERS'}", flush=True)
    machine = f"{os.cpu_count()} {platform.machine()} cores, no GPU used"
    write_json(options.out, {"machine": machine, "versions": versions(), "model": MODEL, "memo": MEMO, "steps": options.steps, "allowed": ALLOWED, "runs": rows})
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
