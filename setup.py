"""Packaging of megatron_memo. Only the package is installed; the scripts at the root run from a checkout."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "megatron_memo" / "__init__.py").read_text(), re.MULTILINE)[1]

setup(
    name="megatron-memo",
    version=VERSION,
    description="Trains very long sequences in Megatron-LM by swapping and recomputing activations token by token",
    packages=find_packages(include=["megatron_memo", "megatron_memo.*"]),
    python_requires=">=3.10",
    install_requires=["megatron-core>=0.17", "numpy", "ortools", "psutil"],
    extras_require={"picture": ["matplotlib"]},
)
