"""Puts the logs of training_curve.sh into one results file and says how far stock's losses and MEMO's are apart."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, List

from harness import versions, write_json

_LINE = re.compile(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([-+.\deE]+)")
_EVALUATION = re.compile(r"validation loss at (.*?) \| lm loss value: ([-+.\deE]+)")


def read(path: Path) -> Dict[str, List]:
    """Losses and step times (ms) by iteration, and evaluations in order."""
    text = path.read_text(errors="replace")
    steps = _LINE.findall(text)
    return {
        "losses": [float(loss) for _, _, loss in steps],
        "time_ms": [float(time) for _, time, _ in steps],
        "evaluations": [[place, float(loss)] for place, loss in _EVALUATION.findall(text)],
    }


def compared(folder: Path, stock: str, memo: str, report: Path) -> Dict[str, Any]:
    """Both runs, and the largest relative difference of their training losses and of their evaluations."""
    runs = {"stock": read(folder / f"{stock}.log"), "memo": read(folder / f"{memo}.log")}
    found = json.loads(report.read_text())
    found.pop("steps")
    return {
        **runs,
        "report": found,
        "largest_relative_difference": _largest([runs[name]["losses"] for name in runs], f"{stock}.log and {memo}.log"),
        "largest_relative_difference_of_evaluations": _largest(
            [[loss for _, loss in runs[name]["evaluations"]] for name in runs], f"evaluations in {stock}.log and {memo}.log"
        ),
    }


def _largest(pair: List[List[float]], what: str) -> float:
    stock, memo = pair
    if not stock or len(stock) != len(memo):
        raise SystemExit(f"{what}: {len(stock)} and {len(memo)} losses found, expected the same number, at least 1")
    return max(abs(a - b) / abs(a) for a, b in zip(stock, memo))


PARTS = {
    "curve": "50 steps",
    "dropout": "10 steps with dropout, every token recomputed in one tile",
    "million": "one step at a million tokens",
}


def main(folder: str) -> int:
    """Writes training_curve.json. Exit status 1: a pair of runs is missing or cannot be compared (the file says why)."""
    out, result, failed = Path(folder), {}, False
    for name in PARTS:
        try:
            result[name] = compared(out, f"{name}_stock", f"{name}_memo", out / name / "report.rank0.json")
        except (OSError, SystemExit) as error:
            result[name], failed = {"error": str(error)}, True
    write_json(str(out / "training_curve.json"), {"benchmark": "training_curve", "versions": versions(), **result})
    for name, text in PARTS.items():
        if "error" in result[name]:
            print(f"{name}: {result[name]['error']}")
            continue
        stock, memo = result[name]["stock"], result[name]["memo"]
        for step in sorted({0, 1, 4, 9, 24, len(stock["losses"]) - 1} & set(range(len(stock["losses"])))):
            print(f"{name}, step {step + 1:3d}: stock {stock['losses'][step]:.5f}, memo {memo['losses'][step]:.5f}")
        print(
            f"{name} ({text}): largest relative difference of {len(stock['losses'])} losses {result[name]['largest_relative_difference']:.1e}, "
            f"of {len(stock['evaluations'])} evaluations {result[name]['largest_relative_difference_of_evaluations']:.1e}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
