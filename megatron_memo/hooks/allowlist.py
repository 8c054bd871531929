"""What of Megatron --memo supports. Every field of its configurations and every argument of its command line is classed; what nobody classed must
be at its default.

A tiled layer stands for the bodies of upstream functions, so a matching signature proves nothing: a setting that it does not know would be
dropped in silence. The other half of the guard is the self-check, which compares the layer with stock.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, List, Mapping, Sequence

from ..errors import UnsupportedError
from .allowlist_args import ARGUMENT_OF, ARGUMENT_RULES, COMBINATIONS, OPTIMIZER_RULES
from .allowlist_model import MODEL_RULES
from .allowlist_outside import OUTSIDE_ARGUMENTS
from .allowlist_rules import Irrelevant, Refusal, Refused, Supported, merged, refusal, same

__all__ = [
    "ARGUMENTS", "RULES", "Irrelevant", "Refusal", "Refused", "Supported", "check_args", "check_config", "check_unknown_args", "raise_if_any", "unclassed",
    "unclassed_args",
]

# The four configurations share their names, so one table serves them all.
RULES = merged((MODEL_RULES, OPTIMIZER_RULES))
# How the command line's arguments are classed: those that are named as a configuration's field like the field.
ARGUMENTS = merged(({ARGUMENT_OF.get(name, name): rule for name, rule in RULES.items()}, ARGUMENT_RULES, OUTSIDE_ARGUMENTS))


def unclassed(config_type: Any) -> List[str]:
    """The fields of a dataclass that no rule names."""
    return sorted(field.name for field in dataclasses.fields(config_type) if field.name not in RULES)


def unclassed_args(names: Iterable[str]) -> List[str]:
    """Those of the command line's destinations that no rule names."""
    return sorted(set(names) - ARGUMENTS.keys())


def check_config(config: Any) -> List[Refusal]:
    """What in ``config``, any of Megatron's configuration dataclasses, --memo does not support. Raises TypeError for anything but a dataclass."""
    found: List[Refusal] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        rule = RULES.get(field.name)
        if rule is None:
            found += _unknown(field, value)
        elif isinstance(rule, Refused) and not rule.permits(value, config):
            found.append(refusal(field.name, rule, value))
    return found


def _unknown(field: "dataclasses.Field[Any]", value: Any) -> List[Refusal]:
    if field.default is not dataclasses.MISSING:
        default, words = field.default, f"its default {field.default}"
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        words = f"its default {default}"
    else:
        default, words = dataclasses.MISSING, "none: it has no default"
    if same(value, default):
        return []
    advice = "This field of the installed Megatron is unknown to megatron_memo. Leave it at its default, or train without --memo."
    return [Refusal(field.name, "", str(value), words, advice)]


def check_args(args: Any) -> List[Refusal]:
    """What in Megatron's namespace of arguments, validated or not, --memo does not support. Arguments that are not there are skipped."""
    found: List[Refusal] = []
    for name, rule in ARGUMENTS.items():
        if isinstance(rule, Refused) and hasattr(args, name) and not rule.permits(getattr(args, name), args):
            found.append(refusal(name, rule, getattr(args, name)))
    return found + [one for one in (combination(args) for combination in COMBINATIONS) if one is not None]


def check_unknown_args(args: Any, defaults: Mapping[str, Any]) -> List[Refusal]:
    """What in Megatron's namespace nobody classed and is not at its default. ``defaults``: of all of Megatron's own arguments, by destination."""
    advice = "This argument of the Megatron that runs is unknown to megatron_memo. Leave it at its default, or train without --memo."
    return [
        Refusal(name, "--" + name.replace("_", "-"), str(getattr(args, name)), f"its default {defaults[name]}", advice)
        for name in unclassed_args(defaults)
        if hasattr(args, name) and not same(getattr(args, name), defaults[name])
    ]


def raise_if_any(refusals: Sequence[Refusal]) -> None:
    """Raises UnsupportedError with a line for each flag (a flag that several configurations hold is named once); does nothing for none."""
    lines = {}
    for one in refusals:
        lines.setdefault(one.flag or one.name, str(one))
    if lines:
        count = f"{len(lines)} settings" if len(lines) > 1 else "1 setting"
        raise UnsupportedError(f"--memo does not support {count} of this job:\n  " + "\n  ".join(lines.values()))
