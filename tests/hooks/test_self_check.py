"""The self-check catches a layer that computes something else than the tiled one, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
ROOT = Path(__file__).resolve().parents[2]
CHANGES = (
    "none",
    "the attention output is scaled",
    "the projection's bias is dropped",
    "the residual is taken from the normed input",
    "the input norm has another epsilon",
    "q is scaled after the rotation",
    "k is rotated the other way",
    "v is normed",
    "the output has a gate",
    "the mlp's residual is doubled",
    "the mlp sees the layer's input",
    "recomputed tiles draw new numbers",
    "recomputed tiles leave a trace in the random numbers",
)


@pytest.fixture(scope="module")
def found():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, str(Path(__file__).with_name("self_check_worker.py")), *CHANGES], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_upstream_layer_is_caught_and_the_unchanged_one_passes(found, change):
    message = found[change]["message"]
    if change == "none":
        assert message is None
    else:
        assert "does not compute what this Megatron's TransformerLayer" in message and ("differs by" in message or "random number generators" in message)


def test_gradients_flags_and_random_states_are_left_as_they_were(found):
    assert all(result["left_as_it_was"] for result in found.values())
