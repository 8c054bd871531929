"""install.sh, as far as it goes without installing anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(*arguments, path, cwd=ROOT, script=None, **environment):
    """Runs install.sh with a PATH of ours, and returns the finished process."""
    env = {"PATH": path, "HOME": str(cwd), **environment}
    return subprocess.run(["/bin/bash", str(script or ROOT / "scripts" / "install.sh"), *arguments], env=env, cwd=cwd, capture_output=True, text=True)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path):
    """A folder with what the script itself needs, and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("bash", "dirname", "cut", "sha256sum", "cat", "id", "grep", "sed", "rm", "cp"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


@pytest.fixture
def copy(tmp_path):
    """A copy of the script in a project of its own, where it may make .venv."""
    target = tmp_path / "project" / "scripts" / "install.sh"
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install.sh", target)
    shutil.copy(ROOT / "constraints.txt", tmp_path / "project")
    shutil.copy(ROOT / "setup.py", tmp_path / "project")
    return target


def test_no_install_accepts_an_environment_that_has_everything():
    import torch

    run = install("--no-install", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert run.returncode == 0, run.stderr
    assert "has everything" in run.stdout and torch.__version__.split("+")[0] in run.stdout


def test_no_install_names_what_is_missing(tools):
    # The Python that this one was made from, without the packages of this one.
    executable(tools / "python", f'exec "{sys.executable}" -I -S "$@"')
    run = install("--no-install", path=str(tools))
    assert run.returncode == 1
    for package in ("torch", "megatron-core", "numpy", "psutil", "pyyaml", "pybind11", "ortools", "pytest"):
        assert package in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_no_install_without_any_python_says_so(tools):
    run = install("--no-install", path=str(tools))
    assert (run.returncode, run.stderr) == (1, "install.sh: --no-install: no python on PATH.\n")


def test_without_a_fitting_python_one_line_says_what_to_install(tools, copy, tmp_path):
    executable(tools / "python3", "exit 1")
    run = install(path=str(tools), script=copy, cwd=tmp_path, PYENV_ROOT=str(tmp_path / "no"))
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1 and "needs Python 3.12 or 3.13" in run.stderr
    assert not (copy.parents[1] / ".venv").exists()


def test_a_shim_that_does_not_run_is_passed_over_for_pyenvs_own_python(tools, copy, tmp_path):
    executable(tools / "python3.12", 'echo "pyenv: python3.12: command not found" >&2\nexit 127')
    pyenv_python = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python"
    # Fits, and stops at the first thing that would make an environment.
    executable(pyenv_python, '[ "$1" = -m ] && exit 7\necho')
    run = install(path=str(tools), script=copy, cwd=tmp_path, PYENV_ROOT=str(tmp_path / "pyenv"))
    assert run.returncode == 7
    assert f"making .venv with {pyenv_python}" in run.stdout


def test_an_environment_that_is_up_to_date_is_left_alone(tools, copy, tmp_path):
    project = copy.parents[1]
    executable(project / ".venv" / "bin" / "python", '[ "$1" = -m ] && { echo pip was called; exit 3; }\n[ "$1" = --version ] && echo "Python 3.12.0"\nexit 0')
    key = subprocess.run(
        ["bash", "-c", 'echo "$(sha256sum constraints.txt setup.py | sha256sum | cut -d" " -f1) Python 3.12.0 $PWD"'], cwd=project, capture_output=True, text=True
    ).stdout
    (project / ".venv" / "installed").write_text(key)
    run = install(path=str(tools), script=copy, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "install.sh: .venv is up to date\n")
    (project / "constraints.txt").write_text("torch==2.11.0\n")
    assert install(path=str(tools), script=copy, cwd=tmp_path).returncode != 0


def test_a_torch_that_is_there_is_pinned_to_what_it_is(tools, copy, tmp_path):
    project = copy.parents[1]
    # Says that it has torch 2.9.1+other, and fails when pip is called.
    executable(
        project / ".venv" / "bin" / "python",
        'case "$1 $2" in --version*) echo "Python 3.12.0";; "-m pip") exit 3;; *version*torch*) echo "2.9.1+other";; esac\nexit 0',
    )
    run = install(path=str(tools), script=copy, cwd=tmp_path)
    assert run.returncode != 0 and "torch 2.9.1+other stays as it is" in run.stdout
    wanted = (project / ".venv" / "requirements.txt").read_text().splitlines()
    assert [line for line in wanted if line.startswith("torch")] == ["torch==2.9.1+other"]
    assert [line for line in wanted if line.startswith("numpy")] == ["numpy"]
    assert "megatron-core==0.19.2" in wanted
    assert not (project / ".venv" / "installed").exists()


def test_an_unknown_argument_is_refused(tools):
    run = install("--help-me", path=str(tools))
    assert run.returncode == 1 and "unknown argument --help-me" in run.stderr
