"""Gradients of every parameter, tiled layers against stock Megatron, in 1, 2 and 4 processes. One launch a world size runs all cases."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
sys.path.insert(0, str(Path(__file__).parent))
from gradient_cases import CASES, EXACT, FEATURES

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


_RESULTS = {}


def results(world, directory):
    """The lines of one launch, by case and type. A launch that failed is not tried again for every test."""
    if world not in _RESULTS:
        _RESULTS[world] = launch(world, directory.mktemp(f"world{world}") / "results.jsonl")
    run, lines = _RESULTS[world]
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return {(line["case"], line["dtype"]): line for line in lines}


def launch(world, path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    run = subprocess.run([*command, str(Path(__file__).with_name("gradient_worker.py")), str(path)], env=env, capture_output=True, text=True, timeout=900)
    return run, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_pair_of_feature_values_is_in_a_case():
    exact = [case for case in CASES if not case.fused and case.dropout == "none" and case.policy in EXACT["policy"]]
    for features, cases in ((FEATURES, CASES), (EXACT, exact)):
        for a, b in itertools.combinations(features, 2):
            assert {(getattr(c, a), getattr(c, b)) for c in cases} == {(x, y) for x in features[a] for y in features[b]}
    assert len(CASES) < 80


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", ""))
def test_float64_gradients_equal_stock_megatrons(world, case, tmp_path_factory):
    line = results(world, tmp_path_factory)[(case.name, "torch.float64")]
    # A fused kernel sums into float32.
    assert line["worst"] < (1e-6 if case.fused else 1e-12), line
    assert line["evaluation"] < 1e-12
    assert line["restored"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_tiles_that_drop_agree_to_the_bit_however_they_are_kept(world, tmp_path_factory):
    by_name = {case.name: case for case in CASES if case.tiles_draw_their_own and not case.fused}
    lines = [line for (name, _), line in results(world, tmp_path_factory).items() if name in by_name]
    assert len({by_name[line["case"]].policy for line in lines}) == 5
    assert [line["case"] for line in lines if not line["identical"]] == []


@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_numbers_go_on_as_in_stock(world, tmp_path_factory):
    assert [line["case"] for line in results(world, tmp_path_factory).values() if not line["same_random_numbers_next"]] == []


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_host_slab_is_exactly_as_large_as_needed(world, tmp_path_factory):
    for line in results(world, tmp_path_factory).values():
        assert line["host_peak_bytes"] == line["host_slab_bytes"] == line["swapped_bytes"]


def test_one_swapped_tile_is_bit_identical_in_float32_and_bfloat16(tmp_path_factory):
    lines = [line for (_, dtype), line in results(1, tmp_path_factory).items() if dtype != "torch.float64"]
    assert len(lines) >= 12
    assert [line["case"] for line in lines if not line["identical"]] == []


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_self_check_passes_and_one_tile_differs_by_nothing(world, tmp_path_factory):
    checked = [line["self_check"] for line in results(world, tmp_path_factory).values() if line["self_check"]]
    assert len(checked) >= 3
    assert {"dropout, four tiles, mixed against kept"} < {name for lines in checked for name, _ in lines}
    for lines in checked:
        *exact, (_, (tensor, small, allowed)) = lines
        assert all(difference == 0.0 for _, (_, difference, _) in exact) and small <= allowed
        assert allowed <= 2e-5 or tensor == "the gradient of self_attention.k_layernorm.bias"  # which is rounding and nothing else
