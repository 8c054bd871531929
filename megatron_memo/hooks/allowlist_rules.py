"""The records of the allowlist: how one setting of Megatron is classed, and what is said when it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable

# Asked with the value found and its owner (a configuration or Megatron's namespace of arguments).
Permits = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Supported:
    """Tiled layers honour every value of this field."""


@dataclass(frozen=True)
class Irrelevant:
    """No value of this field can change what a tiled layer computes.

    Attributes:
        reason: why not.
        gate: the refused field without which Megatron does not read this one; empty when there is none.
    """

    reason: str
    gate: str = ""


@dataclass(frozen=True)
class Refused:
    """Only some values are allowed.

    Attributes:
        flag: as users type it; empty when Megatron has no flag for it.
        advice: what to set or use instead, a sentence.
        allowed: the allowed values in words.
        permits: whether a value is allowed.
    """

    flag: str
    advice: str
    allowed: str
    permits: Permits


@dataclass(frozen=True)
class Refusal:
    """One setting of this run that --memo does not support. ``str`` gives its line."""

    name: str
    flag: str
    found: str
    allowed: str
    advice: str

    def __str__(self) -> str:
        return f"{self.flag or self.name + ' (no flag)'}: found {self.found}, allowed {self.allowed}. {self.advice}"


def same(value: Any, other: Any) -> bool:
    """Whether two settings are equal; what cannot be compared is different."""
    if value is other:
        return True
    try:
        return bool(value == other)
    except Exception:
        return False


def refused(flag: str, advice: str, *values: Any) -> Refused:
    """A rule that allows only ``values``, or False and None when none are given."""
    allowed = values or (False, None)
    named = [value for value in values or (False,) if value not in ("", (), [])]
    return Refused(flag, advice, " or ".join(map(str, named)), lambda value, owner: any(same(value, v) for v in allowed))


def irrelevant(reason: str, names: str, gate: str = "") -> Dict[str, Irrelevant]:
    """The same rule for several fields, named with spaces between them."""
    return {name: Irrelevant(reason, gate) for name in names.split()}


def gated(gate: str, names: str) -> Dict[str, Irrelevant]:
    """Fields that Megatron reads only when ``gate``, a refused field, is on."""
    return irrelevant(f"read only with {gate}, which is refused", names, gate)


def supported(names: str) -> Dict[str, Supported]:
    """The same rule for several fields, named with spaces between them."""
    return {name: Supported() for name in names.split()}


def merged(tables: Iterable[Dict[str, Any]]) -> Dict[str, Any]:
    """One table of all. Raises ValueError when two of them class the same field."""
    result: Dict[str, Any] = {}
    for table in tables:
        twice = sorted(result.keys() & table.keys())
        if twice:
            raise ValueError(f"classed twice: {', '.join(twice)}")
        result.update(table)
    return result


def refusal(name: str, rule: Refused, value: Any) -> Refusal:
    """What is said when ``value`` breaks ``rule``."""
    return Refusal(name, rule.flag, f"{value!r}" if isinstance(value, str) else f"{value}", rule.allowed, rule.advice)


NO_MEMO = "Leave it out, or train without --memo."
