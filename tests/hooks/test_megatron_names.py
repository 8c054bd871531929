"""The allowlist against the names of every Megatron that the project was tried with, listed by scripts/list_megatron_names.py."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from megatron_memo.hooks import allowlist_args, versions
from megatron_memo.hooks.allowlist import ARGUMENTS, RULES, Irrelevant, Refused, unclassed_args

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("list_megatron_names", ROOT / "scripts" / "list_megatron_names.py")
listing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(listing)
MEGATRONS = listing.load()
# The kitchen library adds its flags to Megatron's parser when it is installed.
KITCHEN = {"--kitchen-config-file", "--kitchen-recipe-number"}


def names(megatron, kind):
    return set(MEGATRONS[megatron]["names"][kind])


@pytest.mark.parametrize("megatron", MEGATRONS)
def test_every_field_is_classed(megatron):
    assert sorted(names(megatron, "fields") - RULES.keys()) == []


@pytest.mark.parametrize("megatron", MEGATRONS)
def test_every_argument_is_classed(megatron):
    assert unclassed_args(names(megatron, "arguments")) == []


def test_no_rule_is_for_a_name_that_no_megatron_has():
    fields = set().union(*(names(megatron, "fields") for megatron in MEGATRONS))
    arguments = set().union(*(names(megatron, "arguments") for megatron in MEGATRONS))
    of_kitchen = {flag[2:].replace("-", "_") for flag in KITCHEN}
    assert sorted(RULES.keys() - fields) == []
    assert sorted(ARGUMENTS.keys() - arguments - fields - of_kitchen - set(allowlist_args.ARGUMENT_OF.values())) == []


@pytest.mark.parametrize("megatron", MEGATRONS)
def test_a_refusal_names_flags_that_this_megatron_has(megatron):
    flags, arguments = names(megatron, "flags"), names(megatron, "arguments")
    wrong = {}
    for name, rule in ARGUMENTS.items():
        if isinstance(rule, Refused) and name in arguments:
            named = {rule.flag} - {""} | set(re.findall(r"--[a-z][a-z0-9-]+", rule.advice))
            missing = {flag for flag in named - flags - KITCHEN if not re.match(r"--memo(-|$)", flag)}
            if missing:
                wrong[name] = sorted(missing)
    assert wrong == {}


def test_the_gate_of_an_irrelevant_argument_is_refused():
    gates = {rule.gate for rule in ARGUMENTS.values() if isinstance(rule, Irrelevant) and rule.gate}
    refused = {name for table in (RULES, ARGUMENTS) for name, rule in table.items() if isinstance(rule, Refused)}
    assert "perform_rl_step" in gates and gates <= refused


def test_names_versions_and_runs_speak_of_the_same_megatrons():
    tried = {tried.source: version for version, tried in versions.TRIED.items()}
    assert {name: one["version"] for name, one in MEGATRONS.items()} == tried
    runs = json.loads((ROOT / "benchmarks" / "results" / "megatron_versions.json").read_text())["runs"]
    launched = {row["checkout"]: row["megatron"].partition("+")[0] for row in runs if row.get("megatron")}
    assert launched == {source: version for source, version in tried.items() if source != "PyPI"}


def test_every_checkout_is_known_by_its_commit():
    assert [name for name, one in MEGATRONS.items() if name != "PyPI" and not re.fullmatch("[0-9a-f]{40}", one["commit"] or "")] == []


def test_the_installed_megatron_is_as_listed():
    """A list that nobody made anew says nothing about what is installed."""
    pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    found, listed = listing.read(""), MEGATRONS["PyPI"]
    if found["version"] != listed["version"]:
        pytest.skip(f"Megatron {found['version']} is installed, {listed['version']} is listed")
    assert {kind: sorted(found["names"][kind]) for kind in found["names"]} == {kind: sorted(listed["names"][kind]) for kind in listed["names"]}


def test_what_is_packed_is_loaded_again(tmp_path):
    one = {"version": "1", "commit": None, "names": {"fields": ["a", "b"], "flags": ["--a"]}}
    two = {"version": "2", "commit": "0" * 40, "names": {"fields": ["b", "c"], "flags": ["--a"]}}
    file = tmp_path / "names.json"
    file.write_text(json.dumps(listing.packed({"one": one, "two": two})))
    found = listing.load(file)
    assert {name: {kind: sorted(names) for kind, names in facts["names"].items()} for name, facts in found.items()} == {
        "one": one["names"], "two": two["names"]}
    assert json.loads(file.read_text())["names"]["fields"] == {"one two": ["b"], "one": ["a"], "two": ["c"]}


def test_a_folder_without_megatron_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no Megatron-LM checkout"):
        listing.read(str(tmp_path))


@pytest.mark.parametrize("version", ["0.19.1", "0.19.1+5be9626709", "0.17.1"])
def test_a_version_that_was_tried_needs_no_remark(version):
    assert versions.remark(version) is None


@pytest.mark.parametrize("version", ["0.17.0", "0.21.0rc0", "1.0", "unknown"])
def test_another_version_is_named_with_those_that_were_tried(version):
    remark = versions.remark(version)
    assert f"Megatron {version} is none of" in remark and all(known in remark for known in versions.TRIED)


def test_a_version_tried_before_its_release_says_so():
    assert "before its release" in versions.remark("0.20.0+d98e8a64dd")
