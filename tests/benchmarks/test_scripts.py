"""Every benchmark script runs to its end with no GPU, on small sizes, and its own checks hold."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = "--cpu --tokens 128 --hidden 64 --ffn 128"


def run(script, arguments, ranks=1):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    done = subprocess.run([*launch, str(script), *arguments.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def facts():
    return json.loads(run(Path(__file__).parent / "benchmark_worker.py", "").splitlines()[-1])


def test_the_float64_reference_is_what_megatron_computes(facts):
    assert facts["reference"].pop("rope") < 1e-7  # Megatron takes the cosines in float32
    assert set(facts["reference"]) and all(difference < 1e-13 for difference in facts["reference"].values()), facts["reference"]


def test_full_recompute_runs_each_layer_twice_and_only_while_it_is_on(facts):
    assert facts["forward_calls"] == [1, 2, 1]


def test_a_second_block_can_use_the_parameters_of_the_first(facts):
    assert facts["shared"]


def test_layer_stack_reports_every_mode(tmp_path):
    out = tmp_path / "results.json"
    printed = run(
        "benchmarks/layer_stack.py",
        f"{SMALL} --layers 2 --heads 4 --tp 2 --modes keep-all,full-recompute,memo:4:0.5:1,memo:1:1:0 --repeats 2 --stalls --out {out}",
    )
    result = json.loads(out.read_text())
    assert [len(entry["steps"]) for entry in result["modes"].values()] == [3] * 4
    assert not any("error" in entry for entry in result["modes"].values()), result["modes"]
    assert result["modes"]["full-recompute@te"]["gradient_difference"] == 0.0
    assert result["modes"]["memo:1:1:0@te"]["gradient_difference"] == 0.0
    assert 0 < result["modes"]["memo:4:0.5:1@te"]["gradient_difference"] < 2e-2
    assert "| memo:4:0.5:1@te |" in printed and "stalls" in printed
    table = run("benchmarks/table.py", str(out))
    assert "### layer_stack" in table and "| keep-all@te |" in table


def test_first_step_holds_its_bound_and_its_controls_fail(tmp_path):
    out = tmp_path / "first.json"
    run("benchmarks/first_step.py", f"--cpu --tokens 512 --hidden 256 --heads 4 --ffn 512 --tiles 1,16 --alphas 1 --out {out}")
    result = json.loads(out.read_text())
    assert result["ok"] and {case["control"] for case in result["cases"]} == {False, True}


def test_each_left_out_wait_shows_in_the_simulator(tmp_path):
    out = tmp_path / "waits.json"
    run("benchmarks/waits.py", f"{SMALL} --heads 4 --out {out}")
    result = json.loads(out.read_text())
    assert result["ok"]
    assert [entry["order"] for entry in result["waits"] if entry["seen"]] == ["PRODUCED", "LEFT", "LANDING_FREE", "ARRIVED", "SLOT_READ"]


def test_true_ranks_agree_with_stock_in_float64(tmp_path):
    out = tmp_path / "ranks.json"
    run("benchmarks/ranks_on_one_gpu.py", f"{SMALL} --heads 4 --query-groups 2 --float64 --alphas 0.5 --out {out}", ranks=2)
    result = json.loads(out.read_text())
    assert result["tp"] == 2 and len(result["cases"]) == 2
    assert all(case["difference"] < 1e-13 for case in result["cases"]), result["cases"]


def test_ceiling_adds_up(tmp_path):
    out = tmp_path / "ceiling.json"
    run("benchmarks/ceiling.py", f"{SMALL} --heads 4 --tp 2 --attention sdpa --out {out}")
    result = json.loads(out.read_text())
    parts = result["attention_forward_s"] + result["attention_backward_s"] + 3 * result["linears_forward_s"]
    assert result["layer_s"] == pytest.approx(parts) and result["step_s"] == result["layer_s"]
