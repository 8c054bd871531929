"""Gradients of every parameter under pipeline, tensor and data parallelism, tiled layers against stock Megatron, by Megatron's own schedules."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
sys.path.insert(0, str(Path(__file__).parent))
from parallel_cases import CASES, LAYOUTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=CASES)
def found(request, tmp_path_factory):
    """World size, and the line of each case: one launch runs them all."""
    world, path = request.param, tmp_path_factory.mktemp("parallel") / "results.jsonl"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={port}"]
    run = subprocess.run([*command, str(Path(__file__).with_name("parallel_worker.py")), str(path)], env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    lines = {line["case"]: line["ranks"] for line in map(json.loads, path.read_text().splitlines())}
    assert set(lines) == {case.name for case in CASES[world]}
    return world, lines


@pytest.mark.parametrize("world", CASES)
def test_every_layout_meets_every_reduction_and_policy(world):
    assert {case.layout for case in CASES[world]} == set(LAYOUTS[world])
    assert all(layout.world == world for layout in LAYOUTS[world])
    for layout in LAYOUTS[world]:
        mine = [case for case in CASES[world] if case.layout == layout]
        assert len({case.reduction for case in mine}) == 4 and len({case.policy for case in mine}) == 5


def test_float64_gradients_and_losses_equal_stock_megatrons(found):
    world, lines = found
    for case in CASES[world]:
        for rank in lines[case.name]:
            # A fused kernel sums into float32.
            assert rank["worst"] < (1e-6 if case.fused else 1e-12) and rank["losses"] < 1e-12, (case.name, rank)
            assert rank["same_random_numbers_next"], case.name
            assert bool(rank["checked"]) == (case.layout.context > 1)


def test_the_host_slab_holds_the_passes_in_flight_and_a_plain_stage_uses_all_of_it(found):
    world, lines = found
    for case in CASES[world]:
        for rank, line in enumerate(lines[case.name]):
            stage = rank // (case.layout.tensor * case.layout.context * case.layout.data)
            if case.layout.chunks == 1:
                assert line["passes_in_flight"] == min(case.layout.stages - stage, case.micro_batches)
                assert line["host_peak_bytes"] == line["host_slab_bytes"] == line["passes_in_flight"] * line["swapped_bytes"]
            else:
                assert line["host_peak_bytes"] <= line["host_slab_bytes"] < line["passes_in_flight"] * line["swapped_bytes"]
