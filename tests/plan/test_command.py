"""The command: what it prints, exit statuses, files, and that it needs neither torch nor Megatron nor, without a picture, matplotlib."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_memo.plan.__main__ import BAD_INPUT, DOES_NOT_FIT, FITS, main
from megatron_memo.plan.caching import CachingSettings, simulate
from megatron_memo.plan.csv_format import read_plan, read_trace, write_trace

sys.path.insert(0, str(Path(__file__).parent))
from traces import overlaps, transformer_step  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BOUND = 36_000  # of the step below: the loss, and x and o of three layers


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    write_trace(path, transformer_step(3))
    return path


def test_it_prints_bound_peak_ratio_how_and_proof(trace, capsys):
    assert main([str(trace)]) == FITS
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["buffers"] == str(len(read_trace(trace)))
    assert printed["bound"].split()[0] == printed["peak"].split()[0] == str(BOUND)
    assert printed["ratio"] == "1.000000" and printed["proved"].startswith("yes")
    assert "two levels, 2 kinds of layer passes" in printed["found"]


def test_the_plan_is_written_with_its_offsets(trace, tmp_path):
    out = tmp_path / "plan.csv"
    assert main([str(trace), "--out", str(out), "--alignment", "512"]) == FITS
    buffers, offsets = read_plan(out)
    assert buffers == read_trace(trace) and overlaps(buffers, offsets) == [] and all(offset % 512 == 0 for offset in offsets)


@pytest.mark.parametrize("capacity, status, text", [(BOUND, FITS, "fits, 0 bytes to spare"), (BOUND - 1, DOES_NOT_FIT, "no plan does")])
def test_the_status_says_whether_it_fits_the_capacity(trace, capsys, capacity, status, text):
    assert main([str(trace), "--capacity", str(capacity), "--seconds", "5"]) == status
    assert text in capsys.readouterr().out


def test_bad_input_has_its_own_status_with_line_and_reason(trace, tmp_path, capsys):
    trace.write_text(trace.read_text() + "bad,9,3,100,\n")
    out = tmp_path / "plan.csv"
    assert main([str(trace), "--out", str(out)]) == BAD_INPUT
    lines = len(trace.read_text().splitlines())
    error = capsys.readouterr().err
    assert f"{trace}, line {lines}: expected lower below upper" in error and "found lower 9, upper 3" in error
    assert not out.exists()
    assert main([str(tmp_path / "missing.csv")]) == BAD_INPUT


@pytest.mark.parametrize("arguments", ["--capacity 0", "--capacity 1e9", "--seconds 0", "--seconds nan", "--seconds soon", "--alignment -1", "--unknown"])
def test_bad_arguments_have_the_status_of_bad_input(trace, arguments):
    with pytest.raises(SystemExit) as raised:
        main([str(trace), *arguments.split()])
    assert raised.value.code == BAD_INPUT


def test_the_simulated_caching_allocator_is_printed_on_request(trace, capsys):
    assert main([str(trace), "--caching"]) == FITS
    printed = capsys.readouterr().out
    for settings in (CachingSettings(), CachingSettings(expandable=True)):
        assert f"{settings.name}: {simulate(read_trace(trace), settings).reserved_bytes} bytes reserved" in printed


def run(code, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120)


def test_it_runs_where_torch_megatron_and_matplotlib_are_missing(trace):
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'megatron', 'matplotlib'): sys.modules[name] = None\n"
        "runpy.run_module('megatron_memo.plan', run_name='__main__', alter_sys=True)"
    )
    done = run(code, trace)
    assert done.returncode == FITS and "ratio     1.000000" in done.stdout, done.stderr
    picture = run(code, trace, "--picture", trace.with_suffix(".png"))
    assert picture.returncode == BAD_INPUT and "pip install matplotlib" in picture.stderr
    assert picture.stdout == ""  # said before planning, not after
