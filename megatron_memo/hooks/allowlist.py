"""What of Megatron --memo supports. Every field of its configurations is classed; what nobody classed must be at its default.

A tiled layer stands for the bodies of upstream functions, so a matching signature proves nothing: a setting that it does not know would be
dropped in silence. The other half of the guard is the self-check, which compares the layer with stock.
"""

from __future__ import annotations

import dataclasses
from typing import Any, List, Sequence

from ..errors import UnsupportedError
from .allowlist_args import ARGUMENT_OF, ARGUMENT_RULES, COMBINATIONS, OPTIMIZER_RULES
from .allowlist_model import MODEL_RULES
from .allowlist_rules import Irrelevant, Refusal, Refused, Supported, merged, refusal, same

__all__ = ["RULES", "Irrelevant", "Refusal", "Refused", "Supported", "check_args", "check_config", "raise_if_any", "unclassed"]

# The four configurations share their names, so one table serves them all.
RULES = merged((MODEL_RULES, OPTIMIZER_RULES))


def unclassed(config_type: Any) -> List[str]:
    """The fields of a dataclass that no rule names."""
    return sorted(field.name for field in dataclasses.fields(config_type) if field.name not in RULES)


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
    named = {ARGUMENT_OF.get(name, name): rule for name, rule in RULES.items() if isinstance(rule, Refused)}
    for name, rule in {**named, **ARGUMENT_RULES}.items():
        if hasattr(args, name) and not rule.permits(getattr(args, name), args):
            found.append(refusal(name, rule, getattr(args, name)))
    return found + [one for one in (combination(args) for combination in COMBINATIONS) if one is not None]


def raise_if_any(refusals: Sequence[Refusal]) -> None:
    """Raises UnsupportedError with a line for each flag (a flag that several configurations hold is named once); does nothing for none."""
    lines = {}
    for one in refusals:
        lines.setdefault(one.flag or one.name, str(one))
    if lines:
        count = f"{len(lines)} settings" if len(lines) > 1 else "1 setting"
        raise UnsupportedError(f"--memo does not support {count} of this job:\n  " + "\n  ".join(lines.values()))
