"""Hooks into Megatron: each one is a record; all are checked before any is installed; all can be taken back.

A target is named "package.module:attribute" or "package.module:Class.attribute". After installation every other name that Megatron's loaded
modules have for the same function (from X import f) is replaced too.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

from ..errors import SeamError


@dataclass(frozen=True)
class Hook:
    """One replacement in Megatron.

    Attributes:
        target: "package.module:attribute.path".
        replacement: makes the new function from the original one.
        reason: why it is needed, in a sentence.
        parameters: the names that the original's parameters must begin with; None accepts any signature, for hooks that pass everything through.
    """

    target: str
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    reason: str
    parameters: Optional[Tuple[str, ...]] = None


@dataclass(frozen=True)
class _Place:
    owner: Any
    name: str
    original: Any
    inherited: bool


def megatron_version() -> str:
    """Megatron's version and where it comes from."""
    try:
        import megatron.core
        from megatron.core.package_info import __version__ as version
    except ImportError:
        return "Megatron that is not installed"
    return f"Megatron {version} from {Path(megatron.core.__file__).parents[2]}"


def _resolve(target: str) -> _Place:
    """Raises SeamError where the target does not exist."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SeamError(f"{target}: module {module_name} cannot be imported ({error})") from error
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not hasattr(owner, name):
        raise SeamError(f"{target}: expected a function of this name, found none")
    inherited = name not in vars(owner)
    return _Place(owner, name, getattr(owner, name) if inherited else vars(owner)[name], inherited)


def _problem(hook: Hook) -> Optional[str]:
    try:
        place = _resolve(hook.target)
    except SeamError as error:
        return str(error)
    if getattr(place.original, "_memo_hook", None) is not None:
        return f"{hook.target}: already replaced by megatron_memo; uninstall that first"
    if hook.parameters is None:
        return None
    try:
        found = tuple(inspect.signature(getattr(place.owner, place.name)).parameters)
    except (TypeError, ValueError):
        return f"{hook.target}: expected a function, found {type(place.original).__name__}"
    if found[: len(hook.parameters)] != hook.parameters:
        return f"{hook.target}: expected parameters that begin with ({', '.join(hook.parameters)}), found ({', '.join(found)})"
    return None


def check(hooks: Sequence[Hook]) -> List[str]:
    """What does not fit the imported Megatron, a line each; nothing when all hooks can be installed."""
    return [problem for problem in map(_problem, hooks) if problem is not None]


class Installation:
    """Installed hooks. :meth:`uninstall` puts every name back."""

    def __init__(self) -> None:
        self._places: List[_Place] = []

    def _put(self, place: _Place, value: Any) -> None:
        setattr(place.owner, place.name, value)
        self._places.append(place)

    def uninstall(self) -> None:
        """Megatron as it was. Calling it twice does nothing."""
        while self._places:
            place = self._places.pop()
            if place.inherited:
                delattr(place.owner, place.name)
            else:
                setattr(place.owner, place.name, place.original)


def _aliases(original: Any) -> List[_Place]:
    """Names for ``original`` in Megatron's loaded modules and in the script that runs."""
    modules = [m for n, m in list(sys.modules.items()) if m is not None and (n == "__main__" or n.partition(".")[0] == "megatron")]
    return [_Place(m, name, original, False) for m in modules for name, value in list(vars(m).items()) if value is original]


def install(hooks: Sequence[Hook]) -> Installation:
    """Installs all ``hooks`` or none. Raises SeamError naming each target that does not fit, what was expected, and what was found."""
    problems = check(hooks)
    if problems:
        raise SeamError(
            f"{megatron_version()} does not fit: nothing was installed.\n  " + "\n  ".join(problems) + "\nTrain without --memo, or with a Megatron "
            "version that the README names."
        )
    installation = Installation()
    try:
        for hook in hooks:
            place = _resolve(hook.target)
            kind = type(place.original) if isinstance(place.original, (staticmethod, classmethod)) else None
            new = hook.replacement(place.original.__func__ if kind is not None else place.original)
            new._memo_hook = hook.target
            aliases = [] if kind is not None or place.inherited else _aliases(place.original)
            installation._put(place, kind(new) if kind is not None else new)
            for alias in aliases:
                if (alias.owner, alias.name) != (place.owner, place.name):
                    installation._put(alias, new)
    except BaseException:
        installation.uninstall()
        raise
    return installation
