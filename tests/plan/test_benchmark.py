"""The benchmark of the planner runs, keeps its goals on a small trace, and its made-up pipelines do each pass once."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import planner as benchmark  # noqa: E402
from transformer_traces import KEEP, RECOMPUTE, SWAP, GptShape, pipeline_step, schedule, whole_step  # noqa: E402


def test_a_result_has_what_the_tables_need(tmp_path, capsys):
    out = tmp_path / "planner.json"
    assert benchmark.main(["--only", "swap, 32 layers", "--repeats", "2", "--out", str(out)])["ok"]
    result = json.loads(out.read_text())
    assert [row["trace"] for row in result["rows"]] == ["swap, 32 layers", "swap, 32 layers, odd sizes"]
    for row in result["rows"]:
        assert row["peak_bytes"] == row["bound_bytes"] and row["same_plan_every_time"] and row["proved"]
        assert all(value >= 1 for value in row["native_reserved_over_bound"].values())
    assert capsys.readouterr().out.count("ratio 1.00000") == 2


def test_the_capacity_of_a_challenging_trace_is_in_its_name(tmp_path):
    (tmp_path / "small.10.csv").write_text("id,lower,upper,size\na,0,2,4\nb,1,3,6\n")
    (tmp_path / "large.9.csv").write_text("id,lower,upper,size\na,0,2,4\nb,1,3,6\n")
    result = benchmark.main(["--challenging", str(tmp_path), "--repeats", "1"])
    assert not result["ok"]
    assert {row["trace"]: row["within_goal"] for row in result["rows"]} == {"small": True, "large": False}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_each_chunk_of_each_micro_batch_goes_forward_then_backward_once(stage, chunks):
    order = list(schedule(4, stage, 8, chunks))
    assert len(order) == len(set(order)) == 2 * 8 * chunks
    for batch in range(8):
        for chunk in range(chunks):
            assert order.index((True, batch, chunk)) < order.index((False, batch, chunk))


@pytest.mark.parametrize("policy", [KEEP, SWAP, RECOMPUTE])
def test_every_buffer_is_freed_and_no_instant_is_used_twice(policy):
    for buffers in (whole_step(GptShape(3), policy), pipeline_step(GptShape(2), policy, 4, 1, 4, chunks=2)):
        instants = sorted(instant for buffer in buffers for instant in (buffer.lower, buffer.upper))
        assert instants == list(range(2 * len(buffers)))
