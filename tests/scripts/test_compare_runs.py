"""compare_runs.py on logs whose comparison is known."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_runs.py"
spec = importlib.util.spec_from_file_location("compare_runs", SCRIPT)
compare_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_runs)

STEP = (
    " [2026-01-01 00:00:00.1] iteration {0:8d}/       6 | consumed samples: {0:12d} | elapsed time per iteration (ms): {1:.1f} | "
    "learning rate: 1.000000E-03 | global batch size:     4 | lm loss: {2:.6E} | loss scale: 1.0 | grad norm: 3.1 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
EVALUATION = " validation loss at iteration 6 on {0} set | lm loss value: {1:.6E} | lm loss PPL: 2.0E+01 | \n"


def log_text(losses, times, validation=3.25):
    text = "iterations so far: none\n"
    text += "".join(STEP.format(i + 1, time, loss) for i, (loss, time) in enumerate(zip(losses, times)))
    return text + "-" * 80 + "\n" + EVALUATION.format("validation", validation) + EVALUATION.format("test", 3.5)


@pytest.fixture
def runs(tmp_path):
    """Files of two runs that agree, and the arguments that name them."""
    losses = [5.5, 5.0, 4.5, 4.0, 3.5, 3.0]
    files = {name: tmp_path / name for name in ("stock.log", "memo.log", "report", "stock.bytes", "memo.bytes")}
    files["stock.log"].write_text(log_text(losses, [900, 900, 900, 900, 10, 30]))
    files["memo.log"].write_text(log_text(losses, [900, 900, 900, 900, 40, 60]))
    report = {"policy": {"alpha": 0.5, "tiles": 4}, "swapped_bytes": 3 << 20, "recomputed_bytes": 5 << 20, "host_peak_bytes": 7 << 20}
    files["report"].write_text(json.dumps(report))
    files["stock.bytes"].write_text(json.dumps({"peak_bytes": 30 << 20, "method": "a method that is named"}))
    files["memo.bytes"].write_text(json.dumps({"peak_bytes": 16 << 20, "method": "a method that is named"}))
    options = ("--stock-log", "--memo-log", "--report", "--stock-bytes", "--memo-bytes")
    return losses, files, [text for option, path in zip(options, files.values()) for text in (option, str(path))]


def rows(output):
    """The table's lines as lists of their last columns, by what they begin with."""
    return {line[:34].strip(): line[34:].split() for line in output.splitlines()}


def test_runs_that_agree_give_the_table_and_status_0(runs, capsys):
    assert compare_runs.main(runs[2]) == 0
    output = capsys.readouterr().out
    found = rows(output)
    assert [found[f"loss at step {i}"][:2] for i in (1, 6)] == [["5.500000"] * 2, ["3.000000"] * 2]
    assert found["evaluation, test set"] == ["3.500000", "3.500000", "0.0e+00"]
    assert found["largest difference, relative"] == ["0.0e+00"]
    assert found["swapped, a forward pass"] == ["-", "3.00", "MiB"]
    assert found["recomputed, a forward pass"] == ["-", "5.00", "MiB"]
    assert found["activations, peak (1)"] == ["30.00", "MiB", "16.00", "MiB"]
    assert found["time of a step, median (2)"] == ["20.0", "ms", "50.0", "ms"]
    assert "(1) a method that is named" in output


def test_a_loss_that_differs_by_more_than_the_tolerance_gives_status_1(runs, capsys):
    losses, files, argv = runs
    files["memo.log"].write_text(log_text([*losses[:3], 4.0 * 1.002, *losses[4:]], [1] * 6))
    assert compare_runs.main(argv) == 1
    captured = capsys.readouterr()
    assert rows(captured.out)["largest difference, relative"] == ["2.0e-03"]
    assert "losses differ by 2.0e-03, expected at most 1.0e-03" in captured.err
    assert compare_runs.main([*argv, "--tolerance", "3e-3"]) == 0


def test_an_evaluation_that_differs_gives_status_1(runs):
    losses, files, argv = runs
    files["memo.log"].write_text(log_text(losses, [1] * 6, validation=3.3))
    assert compare_runs.main(argv) == 1


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_never_passes(runs, loss):
    losses, files, argv = runs
    for name in ("stock.log", "memo.log"):
        files[name].write_text(log_text([*losses[:5], loss], [1] * 6))
    assert compare_runs.main(argv) == 1


def test_runs_of_different_length_cannot_be_compared(runs, capsys):
    losses, files, argv = runs
    files["memo.log"].write_text(log_text(losses[:4], [1] * 4))
    assert compare_runs.main(argv) == 1
    assert "stock 6 up to 6" in capsys.readouterr().err


@pytest.mark.parametrize("name, content, message", [
    ("memo.log", "Traceback\n", "expected lines with 'iteration' and 'lm loss', found none in 1 lines"),
    ("report", "{}", "found no policy, swapped_bytes, recomputed_bytes, host_peak_bytes"),
    ("stock.bytes", "not json", "cannot be read"),
])
def test_a_file_without_what_is_needed_is_named(runs, capsys, name, content, message):
    _, files, argv = runs
    files[name].write_text(content)
    assert compare_runs.main(argv) == 1
    error = capsys.readouterr().err
    assert message in error and str(files[name]) in error


def test_live_bytes_may_be_left_out(runs, capsys):
    assert compare_runs.main(runs[2][:6]) == 0
    assert rows(capsys.readouterr().out)["activations, peak (1)"] == ["not", "measured", "not", "measured"]
