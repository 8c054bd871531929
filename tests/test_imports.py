"""Which part of the package may import what: read from the source, so that nothing has to be importable here."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, FrozenSet, List, NamedTuple, Tuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_memo"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
EVERYTHING_OF_OURS = frozenset({"*"})


class Import(NamedTuple):
    """One imported module, by its whole name. ``late``: inside a function, so it runs only when that is called."""

    name: str
    late: bool
    line: int


class Rule(NamedTuple):
    """What a part may import: parts of ours besides itself, torch, and Megatron: "never", "late" (inside functions) or "always"."""

    ours: FrozenSet[str]
    torch: bool
    megatron: str = "never"


def rule(ours: str = "", torch: bool = False, megatron: str = "never") -> Rule:
    return Rule(frozenset(ours.split()), torch, megatron)


# A part is a module or a subpackage of the package's root. What is not named here may import the standard library alone.
RULES: Dict[str, Rule] = {
    "__init__": Rule(EVERYTHING_OF_OURS, torch=False),
    "errors": rule(),
    "config": rule("errors"),
    "flags": rule("errors config"),
    "policy": rule("errors config"),
    "plan": rule("errors"),
    "swap": rule("errors", torch=True),
    "tiles": rule("policy swap errors", torch=True),
    "attention": rule("errors __init__", torch=True),  # the version, which is part of a stored verdict
    "report": rule("errors", torch=True),
    "testing": rule("tiles swap errors", torch=True),
    "plan": rule("errors"),
    "hooks": Rule(EVERYTHING_OF_OURS, torch=True, megatron="always"),
    "runtime": Rule(EVERYTHING_OF_OURS, torch=True),
    "cpu": rule("errors", torch=True, megatron="late"),
    "launch": Rule(EVERYTHING_OF_OURS, torch=True, megatron="late"),
}
# These start the others, and nothing that they start may import them, whatever its rule says.
STARTERS = {"runtime", "launch"}


def imports_of(source: str, module: str, is_package: bool = False) -> List[Import]:
    """The imports of a module named ``module``, relative ones resolved; "from x import y" gives x.y, which may be a module."""
    base = module.split(".") if is_package else module.split(".")[:-1]
    found: List[Import] = []

    def visit(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                visit(child, late)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, late, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*prefix, *(node.module.split(".") if node.module else [])])
            found.extend(Import(f"{origin}.{alias.name}", late, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module", "import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                found.append(Import(str(node.args[0].value), late, node.lineno))
        inside = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def module_of(path: Path) -> Tuple[str, bool]:
    """A file's dotted name, and whether it is a package's __init__."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def part_of(name: str, parts: FrozenSet[str]) -> str:
    """The part of ours that "megatron_memo.x..." names; a name of the package itself belongs to its __init__."""
    names = name.split(".")
    return names[1] if len(names) > 1 and names[1] in parts else "__init__"


PARTS = frozenset(module.split(".")[1] if "." in module else "__init__" for module, _ in map(module_of, FILES))


def breaches(part: str, imports: List[Import]) -> List[str]:
    """The imports that the rule of ``part`` forbids, a line each."""
    allowed = RULES.get(part, rule())
    bad = []
    for one in imports:
        top = one.name.partition(".")[0]
        if top == PACKAGE:
            target = part_of(one.name, PARTS)
            wrong = target != part and target not in allowed.ours and "*" not in allowed.ours
            wrong = wrong or (target in STARTERS and part not in (*STARTERS, "__init__"))
        elif top == "torch":
            wrong = not allowed.torch
        elif top == "megatron":
            wrong = allowed.megatron == "never" or (allowed.megatron == "late" and not one.late)
        else:
            continue
        if wrong:
            bad.append(f"line {one.line}: {one.name}")
    return bad


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT / PACKAGE).as_posix())
def test_a_module_imports_only_what_its_part_may(path):
    module, is_package = module_of(path)
    part = part_of(module, PARTS)
    assert breaches(part, imports_of(path.read_text(), module, is_package)) == []


def test_every_part_has_a_rule_and_every_rule_a_part():
    assert PARTS == RULES.keys()


@pytest.mark.parametrize(
    "part, source, forbidden",
    [
        ("config", "import torch", "torch"),
        ("flags", "def f():\n    from torch import nn", "torch.nn"),
        ("plan", "from ..config import MemoConfig", "megatron_memo.config.MemoConfig"),
        ("policy", "from ..swap.slab import HostSlab", "megatron_memo.swap.slab.HostSlab"),
        ("swap", "from ..tiles import grid", "megatron_memo.tiles.grid"),
        ("swap", "from .. import config", "megatron_memo.config"),
        ("tiles", "import megatron_memo.hooks.seams", "megatron_memo.hooks.seams"),
        ("tiles", "def f():\n    import megatron.core", "megatron.core"),
        ("attention", "from importlib import import_module\nx = import_module('megatron.core')", "megatron.core"),
        ("report", "try:\n    import megatron\nexcept ImportError:\n    pass", "megatron"),
        ("testing", "from ..attention import check", "megatron_memo.attention.check"),
        ("hooks", "from ..runtime import Runtime", "megatron_memo.runtime.Runtime"),
        ("hooks", "def f():\n    from .. import launch", "megatron_memo.launch"),
        ("runtime", "def f():\n    from megatron.training import get_args", "megatron.training.get_args"),
        ("cpu", "import megatron.core", "megatron.core"),
        ("launch", "class C:\n    import megatron.core", "megatron.core"),
    ],
)
def test_a_forbidden_import_is_found_wherever_it_stands(part, source, forbidden):
    found = breaches(part, imports_of(source, f"{PACKAGE}.{part}.module"))
    assert [line.partition(": ")[2] for line in found] == [forbidden]


@pytest.mark.parametrize(
    "part, source",
    [
        ("hooks", "import torch, megatron.core\nfrom ..swap.slab import HostSlab"),
        ("cpu", "import torch\ndef f():\n    import megatron.core.datasets.utils"),
        ("swap", "from .streams import Order\nfrom ..errors import HostMemoryError\nimport json"),
        ("tiles", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.core import ModelParallelConfig"),
    ],
)
def test_an_allowed_import_passes(part, source):
    assert breaches(part, imports_of(source, f"{PACKAGE}.{part}.module")) == []


LIGHT = ["megatron_memo", *(f"megatron_memo.{name}" for name in ("errors", "config", "flags", "policy.tiles", "plan.planner", "plan.__main__", "runtime", "launch"))]


def modules_after(code: str) -> List[str]:
    """The top-level modules that a fresh interpreter has loaded after ``code``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*{{n.partition('.')[0] for n in sys.modules}})"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_neither_torch_nor_megatron(module):
    loaded = modules_after(f"import {module}")
    assert PACKAGE in loaded and "torch" not in loaded and "megatron" not in loaded


def test_what_runs_without_megatron_does_not_load_it():
    modules = [module for module, _ in map(module_of, FILES) if part_of(module, PARTS) in ("swap", "tiles", "attention", "report", "testing", "cpu")]
    loaded = modules_after("\n".join(f"import {module}" for module in modules))
    assert "torch" in loaded and "megatron" not in loaded
