"""Lists the configuration fields and command-line arguments of Megatron versions, for the test that every one of them is classed.

    python scripts/list_megatron_names.py core_v0.19.0=PATH main=PATH PyPI=

NAME=PATH is a Megatron-LM checkout, NAME= the Megatron that is installed. Each is read in a process of its own, with no GPU; versions that the file
has and that are not named stay as they are. --remove NAME takes one out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "hooks" / "megatron_names.json"
WIDTH = 140

# Runs with one Megatron first on its path. What is listed: the fields of all configurations that the allowlist checks, the arguments' destinations
# (what the namespace holds), and the flags (what users type). After "+" a version has the commit of the work tree it lies in.
READER = """
import argparse, dataclasses, importlib, json
from megatron_memo import cpu
cpu.install()
from megatron.core.package_info import __version__
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
names = {
    "fields": set(),
    "arguments": sorted({a.dest for a in parser._actions}),
    "flags": sorted({flag for a in parser._actions for flag in a.option_strings if flag.startswith("--")}),
}
for module, name in (
    ("megatron.core.model_parallel_config", "ModelParallelConfig"),
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
    ("megatron.core.transformer.heterogeneous.heterogeneous_config", "HeterogeneousTransformerConfig"),
    ("megatron.core.optimizer", "OptimizerConfig"),
    ("megatron.core.distributed", "DistributedDataParallelConfig"),
):
    names["fields"] |= {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
names["fields"] = sorted(names["fields"])
print("NAMES " + json.dumps({"version": __version__.partition("+")[0], "names": names}))
"""


def read(path: str) -> Dict[str, Any]:
    """Version, commit (of a git work tree) and names of the Megatron in ``path``, or of the installed one. Raises SystemExit when it cannot be read."""
    if path and not (Path(path) / "megatron" / "training" / "arguments.py").is_file():
        raise SystemExit(f"{path}: no Megatron-LM checkout with megatron/training/arguments.py. Name a work tree, or leave the path out for the installed one.")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(Path(path).resolve())] if path else []), str(ROOT)]), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", READER], env=env, capture_output=True, text=True, cwd=ROOT / "scripts")
    lines = [line for line in run.stdout.splitlines() if line.startswith("NAMES ")]
    if run.returncode != 0 or not lines:
        raise SystemExit(f"{path or 'the installed Megatron'} could not be read:\n{run.stderr[-3000:]}")
    return {**json.loads(lines[0][len("NAMES ") :]), "commit": commit_of(path)}


def commit_of(path: str) -> Optional[str]:
    """The commit of a git work tree whose root ``path`` is, None for anything else."""
    if not path:
        return None
    run = subprocess.run(["git", "-C", path, "rev-parse", "--show-prefix", "HEAD"], capture_output=True, text=True)
    prefix, _, commit = run.stdout.partition("\n")
    return commit.strip() if run.returncode == 0 and not prefix else None


def load(path: Path = FILE) -> Dict[str, Dict[str, Any]]:
    """By the name of each Megatron in the file: its version, commit and names by kind."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    found = {name: {**facts, "names": {}} for name, facts in stored["megatrons"].items()}
    for kind, groups in stored["names"].items():
        for holders, names in groups.items():
            for holder in holders.split():
                found[holder]["names"].setdefault(kind, []).extend(" ".join(names).split())
    return found


def packed(megatrons: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """What the file holds: every name once, under the Megatrons that have it."""
    kinds = sorted({kind for one in megatrons.values() for kind in one["names"]})
    names: Dict[str, Dict[str, List[str]]] = {}
    for kind in kinds:
        holders: Dict[str, List[str]] = {}
        for holder, one in megatrons.items():
            for name in one["names"].get(kind, ()):
                holders.setdefault(name, []).append(holder)
        groups: Dict[str, List[str]] = {}
        for name in sorted(holders):
            groups.setdefault(" ".join(holders[name]), []).append(name)
        names[kind] = {group: wrapped(groups[group]) for group in sorted(groups, key=lambda group: (-len(group.split()), group))}
    return {"megatrons": {name: {"version": one["version"], "commit": one["commit"]} for name, one in megatrons.items()}, "names": names}


def wrapped(names: List[str]) -> List[str]:
    """The names as lines of at most WIDTH characters."""
    lines: List[str] = []
    for name in names:
        if lines and len(lines[-1]) + len(name) < WIDTH:
            lines[-1] += " " + name
        else:
            lines.append(name)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megatrons", nargs="*", metavar="NAME=PATH")
    parser.add_argument("--remove", action="append", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    megatrons = load(options.out)
    for name in options.remove:
        if megatrons.pop(name, None) is None:
            raise SystemExit(f"--remove {name}: {options.out.name} has no such Megatron. It has {', '.join(megatrons) or 'none'}.")
    for given in options.megatrons:
        name, equals, path = given.partition("=")
        if not (name and equals) or " " in name:
            raise SystemExit(f"{given}: expected NAME=PATH, with no space in NAME.")
        megatrons[name] = read(path)
        print(f"{name}: Megatron {megatrons[name]['version']}, {', '.join(f'{len(v)} {k}' for k, v in megatrons[name]['names'].items())}")
    options.out.write_text(json.dumps(packed(megatrons), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
