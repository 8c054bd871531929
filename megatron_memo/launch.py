"""Runs a Megatron-LM script with MEMO: ``torchrun ... -m megatron_memo.launch PATH/pretrain_gpt.py <Megatron's flags> --memo``."""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence

from . import __version__, flags
from .errors import ConfigError, MemoError

# A process that was not started by torchrun is a world of its own.
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def prepare(argv: Sequence[str]) -> Optional[Any]:
    """Does what the --memo flags in ``argv`` ask for, before Megatron is imported; None when they ask for nothing.

    Raises ConfigError for bad flags, SeamError when this Megatron does not fit.
    """
    config = flags.peek(argv)
    if not (config.enabled or config.cpu):
        return None
    if not {"RANK", "WORLD_SIZE"} & set(os.environ):
        os.environ.update({name: value for name, value in _ALONE.items() if name not in os.environ})
    if config.cpu:
        from . import cpu

        cpu.install()
    from .runtime import install_argument_hook

    return install_argument_hook(config)


def prepare_or_exit(argv: Sequence[str]) -> Optional[Any]:
    """:func:`prepare` for scripts: what is wrong with flags or Megatron ends the program with its message alone."""
    return run_or_exit(lambda: prepare(argv))


def run_or_exit(function: Callable[[], Any]) -> Any:
    """``function()``; an error that we raise on purpose ends the program with its message and exit status 1, without a traceback."""
    try:
        return function()
    except MemoError as error:
        raise SystemExit(f"megatron_memo: {type(error).__name__}: {error}") from None


def put_first(script: Path) -> None:
    """The script's folder first on the path, as when Python runs it directly, so that its checkout wins over an installed Megatron."""
    folder = str(script.parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]


def megatron_root() -> Path:
    """The folder that megatron.core and megatron.training come from. Raises ConfigError when they come from two."""
    roots = {}
    for name in ("megatron.core", "megatron.training"):
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin:
            raise ConfigError(
                f"{name} is not importable. Install megatron-core 0.17 or newer (pip install megatron-core), or launch the pretrain_gpt.py of a Megatron-LM checkout."
            )
        roots[name] = Path(spec.origin).resolve().parents[2]
    if len(set(roots.values())) != 1:
        places = ", ".join(f"{name} from {root}" for name, root in roots.items())
        raise ConfigError(f"two Megatrons are mixed: {places}. Put one of them first on PYTHONPATH, or uninstall the other.")
    return roots["megatron.core"]


def build_helpers(root: Path) -> Optional[Path]:
    """Builds a checkout's dataset helpers with this Python where they are missing; returns what was built.

    Only one process of a node builds; others find the result. Raises ConfigError with the compiler's words when it fails.
    """
    folder = root / "megatron" / "core" / "datasets"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target, source = folder / f"helpers_cpp{suffix}", folder / "helpers.cpp"
    if target.exists() or not source.exists():
        return None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{target} is missing and {folder} is not writable. Build the helpers there once, as a user who may write it.")
    try:
        import pybind11
    except ImportError as error:
        raise ConfigError(f"{target} is missing, and building it needs pybind11 (pip install pybind11).") from error
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    command = ["g++", "-O3", "-Wall", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(partial)]
    try:
        built = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{target} is missing, and building it needs g++, which is not installed (apt-get install g++).") from error
    if built.returncode != 0:
        raise ConfigError(f"{target} could not be built: {' '.join(command)}\n{built.stderr[-2000:]}")
    partial.replace(target)
    return target


def start_line(root: Path) -> str:
    """What runs here: for the first line of a log."""
    import torch
    from megatron.core.package_info import __version__ as megatron_version

    return (
        f"megatron_memo {__version__}: Megatron {megatron_version} from {root}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def main(argv: Optional[List[str]] = None) -> None:
    """Runs the script that ``argv`` begins with, with the rest as its arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        raise SystemExit("usage: torchrun ... -m megatron_memo.launch PATH/pretrain_gpt.py <Megatron's flags> [--memo ...]")
    script = Path(argv[0]).resolve()
    if not script.is_file():
        raise SystemExit(f"megatron_memo.launch: {argv[0]} is not a file. Name the pretrain_gpt.py of a Megatron-LM checkout.")
    put_first(script)
    root = run_or_exit(megatron_root)
    run_or_exit(lambda: build_helpers(root))
    prepare_or_exit(argv[1:])
    if int(os.environ.get("RANK", "0")) == 0:
        print(start_line(root), flush=True)
    sys.argv = [str(script), *argv[1:]]
    run_or_exit(lambda: runpy.run_path(str(script), run_name="__main__"))


if __name__ == "__main__":
    main()
