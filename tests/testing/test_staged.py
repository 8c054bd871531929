"""Staged process groups against gloo, in 2 and 3 processes: one launch a world size runs all cases (staged_worker.py)."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_memo.errors import UnsupportedError
from megatron_memo.testing.staged import reduce_parts

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def _cases():
    spec = importlib.util.spec_from_file_location("staged_worker", HERE / "staged_worker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


def _free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module", params=[2, 3])
def results(request, tmp_path_factory):
    """One dict a rank: {case: "" or what differs}."""
    size = request.param
    prefix = str(tmp_path_factory.mktemp("staged") / "rank")
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MASTER_ADDR="localhost", MASTER_PORT=str(_free_port()), WORLD_SIZE=str(size)
    )
    command = [sys.executable, str(HERE / "staged_worker.py"), prefix]
    ranks = [
        subprocess.Popen(command, env=dict(environment, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)[-4000:]
    return [json.loads(Path(prefix + str(rank)).read_text()) for rank in range(size)]


@pytest.mark.parametrize("case", _cases())
def test_staged_equals_gloo_exactly(results, case):
    assert [rank[case] for rank in results] == [""] * len(results)


def test_sixteen_bit_sums_are_rounded_once():
    parts = [torch.tensor([1.0], dtype=torch.bfloat16)] + [torch.tensor([2.0**-8], dtype=torch.bfloat16)] * 3
    one_by_one = parts[0] + parts[1] + parts[2] + parts[3]
    assert one_by_one.item() == 1.0  # what rounding after each term would give
    assert reduce_parts(parts, dist.ReduceOp.SUM) == torch.tensor([1.0 + 3 * 2.0**-8]).bfloat16()


def test_a_reduction_that_nccl_lacks_a_stand_in_for_names_itself():
    with pytest.raises(UnsupportedError, match="BAND"):
        reduce_parts([torch.ones(1, dtype=torch.int32)] * 2, dist.ReduceOp.BAND)
