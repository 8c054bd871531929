"""The Megatron versions that megatron_memo was tried with: the one place that names them.

A new one: launch it (benchmarks/megatron_versions.py), list its settings (scripts/list_megatron_names.py), class those that
tests/hooks/test_megatron_names.py then names, and add a line here. Code does not ask for versions: it looks for what it needs.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional


class Tried(NamedTuple):
    """Where a version came from. ``before_release``: the release that will bear this number may differ."""

    source: str
    before_release: bool = False


# By what megatron.core.package_info.__version__ says.
TRIED: Dict[str, Tried] = {
    "0.17.1": Tried("core_v0.17.1"),
    "0.18.0": Tried("core_v0.18.0"),
    "0.18.2": Tried("core_v0.18.2"),
    "0.19.1": Tried("core_v0.19.0"),  # the tag calls itself so
    "0.19.2": Tried("PyPI"),
    "0.20.0": Tried("main", before_release=True),
}


def remark(version: str) -> Optional[str]:
    """What a user of ``version`` should know; None for one that was tried. After "+" Megatron names the commit of the work tree it lies in."""
    version = version.partition("+")[0]
    tried = TRIED.get(version)
    if tried is None:
        return (
            f"Megatron {version} is none of the versions that megatron_memo was tried with ({', '.join(TRIED)}). Its functions, its settings and one "
            "layer of each kind are checked before the first step, and what does not fit is refused; compare a few losses with stock all the same."
        )
    if tried.before_release:
        return f"Megatron {version} was tried before its release ({tried.source}): this one may differ. Compare a few losses with stock."
    return None
