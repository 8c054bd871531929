"""What is done to an attached model either works or is refused; never silently wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, str(Path(__file__).with_name("attached_worker.py"))], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["ordinary", "detached_before_backward"])
def test_this_works(found, case):
    assert found[case] is None


@pytest.mark.parametrize(
    "case, message",
    [
        ("hooked_parameter", "UnsupportedError: --memo: mlp.linear_fc1.weight of layer 2 have gradient hooks"),
        ("hooked_attention", "UnsupportedError: --memo: layer 2's self_attention has module hooks"),
        ("patched_layer", "UnsupportedError: --memo: 1 of 2 layers have a forward of their own already"),
        ("attached_twice", "UnsupportedError: --memo: 2 of 2 layers have a forward of their own already"),
        ("masked_with_another_backend", "UnsupportedError: --memo-attention: the layers are given an attention mask"),
    ],
)
def test_this_is_refused(found, case, message):
    assert found[case] is not None and found[case].startswith(message)
