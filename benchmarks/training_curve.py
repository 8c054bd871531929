"""Puts the two logs of training_curve.sh into one results file and says how far the curves are apart."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Dict, List

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


def main(folder: str) -> None:
    runs = {name: read(Path(folder) / f"{name}.log") for name in ("stock", "memo")}
    pairs = list(zip(runs["stock"]["losses"], runs["memo"]["losses"]))
    apart = [abs(a - b) / abs(a) for a, b in pairs]
    report = json.loads((Path(folder) / "report.rank0.json").read_text())
    report.pop("steps")
    result = {"benchmark": "training_curve", "versions": versions(), **runs, "report": report, "largest_relative_difference": max(apart)}
    write_json(str(Path(folder) / "training_curve.json"), result)
    for step in sorted({0, 1, 4, 9, 24, len(pairs) - 1}):
        print(f"step {step + 1:3d}: stock {pairs[step][0]:.5f}, memo {pairs[step][1]:.5f}, relative difference {apart[step]:.1e}")
    print(f"{len(pairs)} steps, largest relative difference of the losses {max(apart):.1e}; evaluations {runs['stock']['evaluations']} {runs['memo']['evaluations']}")


if __name__ == "__main__":
    main(sys.argv[1])
