"""Flags and the frozen configuration."""

import argparse
import dataclasses

import pytest

from megatron_memo import flags
from megatron_memo.config import MemoConfig
from megatron_memo.errors import ConfigError


def test_every_flag_fills_a_field_and_every_field_has_a_flag():
    parser = flags.add_arguments(argparse.ArgumentParser())
    actions = {a.dest: a.option_strings[0] for a in parser._actions if a.dest.startswith("memo")}
    values = {"memo_alpha": "0.25", "memo_tiles": "16", "memo_keep": "0.5", "memo_keep_layers": "2", "memo_host_gib": "3.5", "memo_attention": "sdpa", "memo_report": "out"}
    line = [word for dest, option in actions.items() for word in ([option, values[dest]] if dest in values else [option])]
    config = flags.config_from_args(parser.parse_args(line))
    assert config == MemoConfig(True, 0.25, 16, 0.5, 2, 3.5, "sdpa", True, "out", True)
    assert len(actions) == len(dataclasses.fields(MemoConfig))


def test_without_flags_the_configuration_is_the_default_one():
    assert flags.config_from_args(flags.add_arguments(argparse.ArgumentParser()).parse_args([])) == MemoConfig()
    assert flags.config_from_args(argparse.Namespace(lr=1)) == MemoConfig()


def test_peeking_leaves_megatrons_flags_alone():
    assert flags.peek(["--lr", "1e-3", "--memo", "--tp", "8", "--memo-tiles", "4", "--memorize"]) == MemoConfig(enabled=True, tiles=4)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"alpha": -0.1}, "--memo-alpha is a fraction of tokens: expected 0 to 1, found -0.1"),
        ({"alpha": float("nan")}, "--memo-alpha"),
        ({"keep": 2}, "--memo-keep"),
        ({"alpha": 0.6, "keep": 0.6}, "their sum is 1.2"),
        ({"tiles": 0}, "--memo-tiles: expected at least 1 tile, found 0"),
        ({"keep_layers": -1}, "--memo-keep-layers"),
        ({"host_gib": 0}, "--memo-host-gib"),
        ({"host_gib": float("inf")}, "--memo-host-gib"),
        ({"attention": "flash"}, "expected one of host, fa4, sdpa, found 'flash'"),
    ],
)
def test_values_out_of_range_are_refused_by_flag(values, message):
    with pytest.raises(ConfigError, match=message):
        MemoConfig(**values)


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MemoConfig().alpha = 1.0


@pytest.mark.parametrize("line, named", [("--memo-alpha 0.5 --memo-tiles 4", "--memo-alpha, --memo-tiles"), ("--memo-cpu --memo-report out", "--memo-report")])
def test_flags_that_would_do_nothing_without_memo_are_refused(line, named):
    with pytest.raises(ConfigError, match=f"^{named} without --memo: stock Megatron would train"):
        flags.peek(line.split())
