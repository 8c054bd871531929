"""Full-length checks that passed on this machine, in ``${XDG_CACHE_HOME:-~/.cache}/megatron_memo/attention.json``.

A full-length check costs one attention forward and backward at full length, so it is made once per machine, software and shape. Only passed
checks are kept: what failed is tried again. The file is a convenience: unreadable or unwritable, it is a warning and the check is made.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, Dict, Optional

import torch

from .. import __version__
from .cases import Case

_FORMAT = 1


def cache_path() -> Path:
    """Where passed checks are kept. Nothing is created."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "megatron_memo" / "attention.json"


def key_of(case: Case, description: str) -> str:
    """Everything that decides the result: device, driver, libraries, backend, shape and this package's version."""
    parts: Dict[str, Any] = dict(case._asdict(), dtype=str(case.dtype), device=case.device.type)
    parts.update(backend=description, megatron_memo=__version__)
    parts.update(torch=torch.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    if case.device.type == "cuda":
        parts.update(name=torch.cuda.get_device_name(case.device), capability=torch.cuda.get_device_capability(case.device), driver=_driver())
    return json.dumps(parts, sort_keys=True)


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


def recall(key: str) -> Optional[Dict[str, Any]]:
    """What :func:`remember` kept under ``key``, or None."""
    return _read(cache_path()).get(key)


def remember(key: str, record: Dict[str, Any]) -> None:
    """Keeps ``record`` under ``key``. Processes may do this at once: each file is whole; the last one written wins."""
    path = cache_path()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = _read(path, quiet=True)
        entries[key] = record
        descriptor, temporary = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"format": _FORMAT, "entries": entries}, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error}): the full-length attention check will be made again at the next start.", stacklevel=2)
        if temporary is not None:
            try:
                os.unlink(temporary)
            except OSError:
                pass


def _read(path: Path, quiet: bool = False) -> Dict[str, Dict[str, Any]]:
    try:
        stored = json.loads(path.read_text())
        if stored["format"] != _FORMAT:
            return {}
        return {str(key): dict(record) for key, record in stored["entries"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if not quiet:
            warnings.warn(f"{path} is not readable ({type(error).__name__}: {error}) and is ignored; it is written anew.", stacklevel=3)
        return {}
