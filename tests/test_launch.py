"""Launching a checkout's script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_memo import launch
from megatron_memo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments, path=()):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    env.update(PYTHONPATH=os.pathsep.join([str(ROOT), *map(str, path)]), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    return subprocess.run([sys.executable, "-m", "megatron_memo.launch", *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120)


def fake_megatron(folder, *parts):
    for part in parts:
        package = folder / "megatron" / part
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    (folder / "megatron" / "core").mkdir(parents=True, exist_ok=True)
    (folder / "megatron" / "core" / "package_info.py").write_text("__version__ = '9.9'\n")
    return folder


def test_the_scripts_folder_comes_first_and_arguments_and_exit_status_pass_through(tmp_path):
    fake_megatron(tmp_path, "core", "training")
    (tmp_path / "sibling.py").write_text("WHO = 'sibling'\n")
    script = tmp_path / "pretrain.py"
    script.write_text("import sys, sibling, megatron.core\nprint('ran', sibling.WHO, sys.argv[1:], megatron.core.__file__)\nsys.exit(7)\n")
    result = run(script, "--lr", "1")
    assert result.returncode == 7, result.stderr
    assert f"ran sibling ['--lr', '1'] {tmp_path}" in result.stdout
    assert f"Megatron 9.9 from {tmp_path}" in result.stdout.splitlines()[0]


def test_two_megatrons_are_not_mixed(tmp_path):
    one, two = fake_megatron(tmp_path / "one", "core"), fake_megatron(tmp_path / "two", "training")
    (one / "script.py").write_text("print('ran')\n")
    result = run(one / "script.py", path=[two])
    assert result.returncode == 1 and "ran" not in result.stdout
    assert "two Megatrons are mixed" in result.stderr and str(one) in result.stderr and str(two) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments, message", [((), "usage: "), (("--memo",), "usage: "), (("nowhere.py",), "nowhere.py is not a file")])
def test_a_missing_script_is_said_in_one_line(arguments, message):
    result = run(*arguments)
    assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr


def test_without_our_flags_nothing_is_imported_or_installed():
    code = "import sys; from megatron_memo import launch; assert launch.prepare(['--lr', '1']) is None; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_megatrons_own_parser_knows_the_flags_and_gets_what_a_cpu_needs(tmp_path):
    pytest.importorskip("megatron.training", reason="megatron-core is not installed")
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron.training.arguments import parse_args\nargs = parse_args()\n"
        "print(args.memo_cpu, args.memo_tiles, args.transformer_impl, args.distributed_backend, args.num_workers)\n"
    )
    result = run(script, "--memo-cpu")
    assert "True 8 local gloo 0" in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("--memo-cpu: set transformer_impl=local") == 1


def checkout(tmp_path, source):
    folder = tmp_path / "megatron" / "core" / "datasets"
    folder.mkdir(parents=True)
    (folder / "helpers.cpp").write_text(source)
    return tmp_path


def test_missing_dataset_helpers_are_built_once(tmp_path):
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    root = checkout(tmp_path, "#include <pybind11/pybind11.h>\nPYBIND11_MODULE(helpers_cpp, m) { m.attr(\"answer\") = 42; }\n")
    built = launch.build_helpers(root)
    code = f"import sys; sys.path.insert(0, {str(built.parent)!r}); import helpers_cpp; print(helpers_cpp.answer)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "42"
    assert launch.build_helpers(root) is None


def test_helpers_that_do_not_compile_show_the_compilers_words(tmp_path):
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    with pytest.raises(ConfigError, match="could not be built"):
        launch.build_helpers(checkout(tmp_path, "this is not C++\n"))
    assert not list(tmp_path.rglob("*.so"))


def test_a_tree_without_helpers_needs_none(tmp_path):
    assert launch.build_helpers(tmp_path) is None
