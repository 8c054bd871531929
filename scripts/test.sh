#!/usr/bin/env bash
# Installs what the tests need and runs all tests that need no GPU.
#   bash scripts/test.sh [--no-install] [pytest's arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --no-install ]; then
    shift
    bash scripts/install.sh --no-install
    PYTHON=$(command -v python || command -v python3)
else
    bash scripts/install.sh
    PYTHON=$PWD/.venv/bin/python
fi
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec "$PYTHON" -m pytest tests -q --import-mode=importlib "$@"
