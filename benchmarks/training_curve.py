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


def main(folder: str) -> None:
    out = Path(folder)
    curve = compared(out, "stock", "memo", out / "report.rank0.json")
    million = compared(out, "million_stock", "million_memo", out / "million" / "report.rank0.json")
    write_json(str(out / "training_curve.json"), {"benchmark": "training_curve", "versions": versions(), **curve, "million": million})
    stock, memo = curve["stock"]["losses"], curve["memo"]["losses"]
    for step in sorted({0, 1, 4, 9, 24, len(stock) - 1} & set(range(len(stock)))):
        print(f"step {step + 1:3d}: stock {stock[step]:.5f}, memo {memo[step]:.5f}")
    for name, result in (("curve", curve), ("a million tokens", million)):
        print(
            f"{name}: {len(result['stock']['losses'])} steps, largest relative difference of the losses {result['largest_relative_difference']:.1e}, "
            f"of {len(result['stock']['evaluations'])} evaluations {result['largest_relative_difference_of_evaluations']:.1e}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
