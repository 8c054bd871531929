"""report.rankN.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict

from ..errors import ConfigError


def report_path(directory: str, rank: int) -> Path:
    """Where rank ``rank`` writes its report."""
    return Path(directory) / f"report.rank{rank}.json"


def make_directory(directory: str) -> None:
    """Creates ``directory``. Raises ConfigError when nothing can be written there, which is better known before training than after."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError as error:
        raise ConfigError(f"--memo-report {directory}: the directory cannot be made: {error.strerror}. Name another one.") from error
    if not writable:
        raise ConfigError(f"--memo-report {directory}: the directory is not writable. Name another one.")


def write_report(directory: str, rank: int, report: Dict[str, Any]) -> Path:
    """Writes ``report`` whole or not at all, and returns its path."""
    path = report_path(directory, rank)
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)
    return path
