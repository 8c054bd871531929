"""Hooks into Megatron: each one is a record; all are checked before any is installed; all can be taken back.

A target is named "package.module:attribute" or "package.module:Class.attribute". After installation every other name that Megatron's loaded
modules have for the same function (``from x import f``) is replaced too.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ..errors import SeamError

Function = Callable[..., Any]
Names = Tuple[str, ...]


@dataclass(frozen=True)
class Hook:
    """One replacement in Megatron.

    Attributes:
        target: "package.module:attribute.path".
        replacement: makes the new function from the original one. It gets and returns the plain function of a static or class method.
        reason: why it is needed, in a sentence.
        parameters: the names that the original's parameters must begin with, "self" included; several such tuples when Megatron versions
            differ (any of them will do); None accepts any signature, for hooks that pass everything through.
    """

    target: str
    replacement: Callable[[Function], Function]
    reason: str
    parameters: Optional[Union[Names, Tuple[Names, ...]]] = None

    @property
    def choices(self) -> Tuple[Names, ...]:
        """The accepted beginnings, one tuple of names each; none when any signature is accepted."""
        if self.parameters is None:
            return ()
        return tuple(self.parameters) if any(isinstance(name, tuple) for name in self.parameters) else (tuple(self.parameters),)


@dataclass(frozen=True)
class Problem:
    """Why a hook cannot be installed."""

    hook: Hook
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.hook.target}: expected {self.expected}, found {self.found} (needed because {self.hook.reason})"


@dataclass(frozen=True)
class _Place:
    """A name that is to hold another function. ``held`` is what the owner itself holds there: a function or its static or class method."""

    owner: Any
    name: str
    held: Any
    inherited: bool

    @property
    def function(self) -> Any:
        return self.held.__func__ if isinstance(self.held, (staticmethod, classmethod)) else self.held

    def put(self, function: Function) -> Any:
        """Sets ``function``, as the kind of method that is there, and returns what the owner now holds."""
        value = type(self.held)(function) if isinstance(self.held, (staticmethod, classmethod)) else function
        setattr(self.owner, self.name, value)
        return value

    def restore(self) -> None:
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.held)

    def holds(self) -> Any:
        return vars(self.owner).get(self.name)

    def __str__(self) -> str:
        owner = self.owner
        return f"{owner.__name__}.{self.name}" if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}.{self.name}"


def megatron_version() -> str:
    """Version of the Megatron core that is imported. Raises ImportError when there is none."""
    from megatron.core.package_info import __version__

    return __version__


def megatron_root() -> Path:
    """The folder that holds the imported ``megatron`` package: a checkout or site-packages. Raises ImportError when there is none."""
    import megatron.core

    return Path(megatron.core.__file__).resolve().parents[2]


def _megatron() -> str:
    try:
        return f"Megatron {megatron_version()} from {megatron_root()}"
    except ImportError:
        return "Megatron, which cannot be imported,"


# What is installed in this process, by the owner's id and the name. The owner is held, so that its id stays its own.
_installed: Dict[Tuple[int, str], Tuple[str, Any]] = {}


def _resolve(hook: Hook) -> Union[_Place, Problem]:
    module_name, colon, path = hook.target.partition(":")
    if not (module_name and colon and path):
        return Problem(hook, 'a target "package.module:attribute.path"', repr(hook.target))
    try:
        owner: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever a module raises while it is imported, the hook does not fit
        return Problem(hook, f"a module {module_name}", f"{type(error).__name__}: {error}")
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            return Problem(hook, f"an attribute {parent} of {getattr(owner, '__name__', owner)}", "none")
        owner = getattr(owner, parent)
    missing = object()
    held = inspect.getattr_static(owner, name, missing)
    if held is missing:
        return Problem(hook, f"a function {name} of {getattr(owner, '__name__', owner)}", "none")
    return _Place(owner, name, held, inherited=name not in vars(owner))


def _look(hook: Hook) -> Union[_Place, Problem]:
    """Where the hook goes, or why it does not fit."""
    place = _resolve(hook)
    if isinstance(place, Problem):
        return place
    installed = _installed.get((id(place.owner), place.name))
    if installed is not None:
        return Problem(hook, "Megatron's own function", f"the hook {installed[0]} of megatron_memo, installed earlier; uninstall that first")
    if not callable(place.function):
        return Problem(hook, "a function", f"a {type(place.held).__name__}")
    if not hook.choices:
        return place
    try:
        found = _parameters(place.function)
    except (TypeError, ValueError) as error:
        return Problem(hook, _either(hook.choices), f"no signature ({error})")
    if any(found[: len(names)] == names for names in hook.choices):
        return place
    return Problem(hook, _either(hook.choices), f"({', '.join(found)})")


def _parameters(function: Function) -> Names:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return tuple(stars.get(p.kind, "") + name for name, p in inspect.signature(function).parameters.items())


def _either(choices: Tuple[Names, ...]) -> str:
    return "parameters that begin with " + " or ".join(f"({', '.join(names)})" for names in choices)


def _looked(hooks: Sequence[Hook]) -> Tuple[List[_Place], List[Problem]]:
    places: List[_Place] = []
    problems: List[Problem] = []
    taken: Dict[Tuple[int, str], Hook] = {}
    for hook in hooks:
        seen = _look(hook)
        if isinstance(seen, _Place):
            first = taken.setdefault((id(seen.owner), seen.name), hook)
            if first is hook:
                places.append(seen)
                continue
            seen = Problem(hook, "one hook for each function", f"{first.target} as well, for the same one")
        problems.append(seen)
    return places, problems


def check(hooks: Sequence[Hook]) -> List[Problem]:
    """What does not fit the imported Megatron; nothing when all hooks can be installed. Imports the modules of the targets and changes nothing."""
    return _looked(hooks)[1]


class Installation:
    """Installed hooks. :meth:`uninstall` puts every name back."""

    def __init__(self, modules: Sequence[Union[str, ModuleType]] = ()) -> None:
        self._extra = tuple(modules)
        self._placed: List[Tuple[_Place, Any]] = []
        self._functions: List[Tuple[Any, Function]] = []
        self._keys: List[Tuple[int, str]] = []

    @property
    def names(self) -> Tuple[str, ...]:
        """Every name that was replaced, aliases included."""
        return tuple(str(place) for place, _ in self._placed)

    def _put(self, place: _Place, function: Function) -> None:
        self._placed.append((place, place.put(function)))

    def uninstall(self) -> None:
        """Megatron as it was, modules that were imported meanwhile included. Calling it twice does nothing.

        Raises SeamError, and changes nothing, when somebody else has replaced one of our functions since: theirs may call ours.
        """
        foreign = [str(place) for place, value in self._placed if place.holds() is not value]
        if foreign:
            raise SeamError(f"{', '.join(foreign)}: replaced by somebody else after megatron_memo. Take that back first, then uninstall again.")
        self._take_back()

    def _take_back(self) -> None:
        while self._placed:
            self._placed.pop()[0].restore()
        for original, new in self._functions:
            for place in _aliases(new, self._extra):
                setattr(place.owner, place.name, original)
        for key in self._keys:
            _installed.pop(key, None)
        self._functions, self._keys = [], []


def _aliases(function: Any, extra: Iterable[Union[str, ModuleType]]) -> List[_Place]:
    """Names for ``function`` in Megatron's loaded modules, in the script that runs and in ``extra`` modules."""
    names = {m for m in extra if isinstance(m, str)}
    loaded = [m for n, m in list(sys.modules.items()) if n in names or n == "__main__" or n.partition(".")[0] == "megatron"]
    modules = {id(m): m for m in [*loaded, *(m for m in extra if not isinstance(m, str))] if isinstance(m, ModuleType)}
    return [_Place(m, name, function, False) for m in modules.values() for name, value in list(vars(m).items()) if value is function]


def install(hooks: Sequence[Hook], modules: Sequence[Union[str, ModuleType]] = ()) -> Installation:
    """Installs all ``hooks`` or none.

    Args:
        hooks: each gets the original function, also where another hook replaces a base class's.
        modules: names of loaded modules, or modules, that may hold aliases besides Megatron's and the running script.

    Raises:
        SeamError: names each target that does not fit, what was expected and found, and Megatron's version and root. Nothing is installed.
    """
    places, problems = _looked(hooks)
    if problems:
        lines = "\n  ".join(map(str, problems))
        raise SeamError(
            f"{_megatron()} does not fit megatron_memo; nothing was installed.\n  {lines}\n"
            "Use a Megatron version that the README names, or leave out --memo and --memo-cpu."
        )
    made = [(place, hook.replacement(place.function)) for hook, place in zip(hooks, places)]
    for hook, (_, new) in zip(hooks, made):
        if not callable(new):
            raise SeamError(f"{hook.target}: its replacement is {new!r}, expected a function; nothing was installed.")
    installation = Installation(modules)
    try:
        for hook, (place, new) in zip(hooks, made):
            installation._put(place, new)
            installation._keys.append((id(place.owner), place.name))
            installation._functions.append((place.function, new))
            _installed[installation._keys[-1]] = (hook.target, place.owner)
        _replace_aliases(installation, made)
    except BaseException:
        installation._take_back()
        raise
    return installation


def _replace_aliases(installation: Installation, made: Sequence[Tuple[_Place, Function]]) -> None:
    # A function that a class only inherits is still the base's own: its other names stay.
    own = [(place, new) for place, new in made if not place.inherited]
    for place, new in own:
        for alias in _aliases(place.function, installation._extra):
            installation._put(alias, new)
    left = [str(alias) for place, _ in own for alias in _aliases(place.function, installation._extra)]
    if left:
        raise SeamError(f"{_megatron()}: {', '.join(left)} still hold Megatron's own function after it was replaced; nothing was installed.")
