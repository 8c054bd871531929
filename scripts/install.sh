#!/usr/bin/env bash
# Makes .venv with what constraints.txt lists and this project. A torch that the environment already has stays as it is.
#   bash scripts/install.sh               installs into .venv (made with Python 3.12 or 3.13)
#   bash scripts/install.sh --no-install  installs nothing: checks that the current environment has everything
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The version of an importable torch, or nothing. It is not imported, which takes seconds.
TORCH_OF='import importlib.metadata as m, importlib.util as u; print(m.version("torch") if u.find_spec("torch") else "")'

say() { printf 'install.sh: %s\n' "$*"; }
fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

fits() { # A shim of pyenv's may be on PATH and still not run: run it.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1
}

find_python() { # Prints a Python 3.12 or 3.13.
    local root candidate
    for candidate in python3.12 python3.13 python3 python; do
        candidate=$(command -v "$candidate" || true)
        if [ -n "$candidate" ] && fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    for root in "${PYENV_ROOT:-$HOME/.pyenv}" "$(pyenv root 2>/dev/null || true)"; do
        for candidate in "$root"/versions/3.12*/bin/python "$root"/versions/3.13*/bin/python; do
            if [ -x "$candidate" ] && fits "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    done
    fail "needs Python 3.12 or 3.13 with venv; found neither on PATH nor among pyenv's. Install one: apt-get install python3.12-venv, or pyenv install 3.12."
}

check_current() { # --no-install
    local python missing
    python=$(command -v python || command -v python3 || true)
    [ -n "$python" ] || fail "--no-install: no python on PATH."
    missing=$("$python" - <<'PYTHON'
import importlib.util
import sys

NEEDED = {
    "torch": "torch", "megatron.core": "megatron-core", "megatron.training": "megatron-core 0.17 or newer", "numpy": "numpy", "psutil": "psutil",
    "yaml": "pyyaml", "pybind11": "pybind11", "ortools": "ortools", "pytest": "pytest",
}


def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


missing = [package for name, package in NEEDED.items() if not found(name)]
if sys.version_info < (3, 10):
    missing.insert(0, "Python 3.10 or newer")
print(", ".join(dict.fromkeys(missing)))
PYTHON
    )
    [ -z "$missing" ] || fail "--no-install: $python lacks $missing. Install what is missing (versions: constraints.txt), or run without --no-install."
    say "--no-install: $python has everything (torch $("$python" -c "$TORCH_OF"))"
}

need_compiler() { # need_compiler PYTHON: a checkout of Megatron-LM has its dataset helpers built at the first launch.
    local headers missing=()
    headers=$("$1" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))')
    command -v g++ >/dev/null || missing+=(g++)
    [ -f "$headers" ] || missing+=("$("$1" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "apt-get install ${missing[*]}"
        if apt-get install -y -qq "${missing[@]}" >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq "${missing[@]}"; } >/dev/null 2>&1; then
            return 0
        fi
    fi
    say "launching a Megatron-LM checkout will need ${missing[*]}, which could not be installed here (apt-get install ${missing[*]})"
}

install() {
    local python torch stamp key begin
    begin=$SECONDS
    stamp=.venv/installed
    if [ -x .venv/bin/python ] && fits .venv/bin/python; then
        key="$(sha256sum constraints.txt setup.py | sha256sum | cut -d' ' -f1) $(.venv/bin/python --version) $PWD"
        if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
            say ".venv is up to date"
            return
        fi
    else
        python=$(find_python)
        torch=$("$python" -c "$TORCH_OF")
        if [ -n "$torch" ] && "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
            say "making .venv with $python, whose torch $torch it uses"
            "$python" -m venv --clear --system-site-packages .venv
        else
            say "making .venv with $python ($("$python" --version))"
            "$python" -m venv --clear .venv
        fi
        key="$(sha256sum constraints.txt setup.py | sha256sum | cut -d' ' -f1) $(.venv/bin/python --version) $PWD"
    fi
    rm -f "$stamp"
    need_compiler .venv/bin/python
    torch=$(.venv/bin/python -c "$TORCH_OF")
    if [ -n "$torch" ]; then
        say "torch $torch stays as it is"
        # That torch may need another numpy than ours.
        { grep -vE '^(torch|numpy)==' constraints.txt && printf 'torch==%s\nnumpy\n' "$torch"; } >.venv/requirements.txt
    else
        cp constraints.txt .venv/requirements.txt
    fi
    say "installing $(grep -cE '^[a-z]' .venv/requirements.txt) packages and what they need (a new torch is 2.5 GB: a minute or more)"
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -r .venv/requirements.txt 2>&1 |
        sed -un -e 's/^Collecting \([^ ]*\).*/  \1/p' -e 's/^ *\(Downloading .*\)/  \1/p' -e 's/^\(Installing collected packages\).*/  \1/p' -e '/^ERROR/p'
    .venv/bin/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
    echo "$key" >"$stamp"
    say "done in $((SECONDS - begin)) s: torch $(.venv/bin/python -c "$TORCH_OF"), .venv/bin/python"
}

case "${1:-}" in
    --no-install) check_current ;;
    '') install ;;
    *) fail "unknown argument $1. Usage: bash scripts/install.sh [--no-install]" ;;
esac
