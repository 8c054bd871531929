"""The allowlist against the installed Megatron's configurations and its own argument parser. Other versions: test_megatron_names.py."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
from typing import Any, Optional

import pytest

from megatron_memo import flags
from megatron_memo.errors import UnsupportedError
from megatron_memo.hooks import allowlist_args, allowlist_model
from megatron_memo.hooks.allowlist import (
    RULES, Irrelevant, Refused, check_args, check_config, check_unknown_args, raise_if_any, unclassed, unclassed_args)

# Flags that the parser of the installed Megatron may lack: the kitchen library adds its own, and 0.17 had legacy models.
SOMETIMES = {"--kitchen-config-file", "--kitchen-recipe-number", "--use-legacy-models"}
REFUSED = {name: rule for name, rule in RULES.items() if isinstance(rule, Refused)}


@pytest.fixture(scope="module")
def megatron():
    """The installed Megatron's configuration classes, by name, and its parser."""
    pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    classes = (
        TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig, ModelParallelConfig, OptimizerConfig, DistributedDataParallelConfig)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return types.SimpleNamespace(classes={c.__name__: c for c in classes}, parser=flags.add_arguments(parser))


def transformer(megatron, **settings):
    return megatron.classes["TransformerConfig"](
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, **settings})


def arguments(megatron, line=""):
    required = "--hidden-dropout 0 --attention-dropout 0 --seq-length 128 "
    return megatron.parser.parse_args((required + line).split())


def other_than(rule, default):
    """A value that the rule does not permit and that is of the default's kind where that is possible."""
    owner = types.SimpleNamespace(tensor_model_parallel_size=4)
    others = (2, 0.5, "dist_muon", "other", True, ("*.bias",))
    return next(value for value in ((True, *others) if isinstance(default, bool) else others) if not rule.permits(value, owner))


def test_every_field_of_the_installed_megatron_is_classed(megatron):
    assert {name: unclassed(one) for name, one in megatron.classes.items() if unclassed(one)} == {}


def test_defaults_pass(megatron):
    assert check_config(transformer(megatron)) == []
    for name in ("ModelParallelConfig", "OptimizerConfig", "DistributedDataParallelConfig"):
        assert check_config(megatron.classes[name]()) == []
    assert check_args(arguments(megatron)) == []
    raise_if_any([])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_gives_its_own_refusal_and_no_other(name):
    rule = REFUSED[name]
    default = next((value for value in (False, None, 0, 1, "none", "vanilla", "LayerNorm", "local", "adam") if rule.permits(value, None)), None)
    assert rule.permits(default, types.SimpleNamespace(tensor_model_parallel_size=1))
    value = other_than(rule, default)
    kind = dataclasses.make_dataclass("Config", [(name, Any, default), ("tensor_model_parallel_size", int, 4)])
    config = kind(tensor_model_parallel_size=1)
    assert check_config(config) == []
    setattr(config, name, value)
    config.tensor_model_parallel_size = 4
    (found,) = check_config(config)
    assert (found.name, found.flag, found.advice) == (name, rule.flag, rule.advice)
    line = str(found)
    assert line.startswith(rule.flag or f"{name} (no flag)") and rule.allowed in line and str(value) in line and "\n" not in line


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_is_refused_in_megatrons_own_configurations(megatron, name):
    owners = [c for c in megatron.classes.values() if name in {f.name for f in dataclasses.fields(c)}]
    if not owners:
        pytest.skip(f"the installed Megatron has no {name}")
    for owner in owners:
        if owner.__name__ in ("OptimizerConfig", "DistributedDataParallelConfig", "ModelParallelConfig"):
            config = owner()
        else:
            config = transformer(megatron)
            if not hasattr(config, name):  # of a subclass that cannot be made without files
                continue
        value = other_than(REFUSED[name], getattr(config, name))
        setattr(config, name, value)
        if name in ("num_query_groups", "tensor_parallel_num_weight_shards"):
            config.tensor_model_parallel_size = 4
        assert [found.name for found in check_config(config)] == [name]


def test_every_flag_that_is_named_exists(megatron):
    known = {option for action in megatron.parser._actions for option in action.option_strings}
    named = set()
    for rule in [*REFUSED.values(), *allowlist_args.ARGUMENT_RULES.values()]:
        named |= {rule.flag} - {""} | set(re.findall(r"--[a-z][a-z0-9-]+", rule.advice))
    for args in (
        types.SimpleNamespace(seq_length=1 << 20, create_attention_mask_in_dataloader=True),
        types.SimpleNamespace(gradient_accumulation_fusion=True, fp16=True),
        types.SimpleNamespace(gradient_accumulation_fusion=True, bf16=True, grad_reduce_in_bf16=True),
        types.SimpleNamespace(deterministic_mode=True, memo_attention="fa4"),
        types.SimpleNamespace(attention_dropout=0.1, memo_attention="fa4"),
        types.SimpleNamespace(hidden_dropout=0.1, te_rng_tracker=True),
        types.SimpleNamespace(context_parallel_size=2, memo_attention="fa4"),
        types.SimpleNamespace(context_parallel_size=2),
    ):
        (found,) = check_args(args)
        named |= set(re.findall(r"--[a-z][a-z0-9-]+", str(found)))
    assert named - known - SOMETIMES == set()


def test_a_flag_belongs_to_the_field_it_is_named_for(megatron):
    """What the parser stores under a refused field's name comes from the flag that the refusal names."""
    flags_of = {action.dest: action.option_strings for action in megatron.parser._actions}
    named = {allowlist_args.ARGUMENT_OF.get(name, name): rule for name, rule in REFUSED.items()}
    wrong = {
        dest: (rule.flag, flags_of[dest])
        for dest, rule in {**named, **allowlist_args.ARGUMENT_RULES}.items()
        if dest in flags_of and rule.flag not in flags_of[dest]
    }
    assert wrong == {}


def test_what_has_no_flag_is_in_no_command_line(megatron):
    flags_of = {action.dest for action in megatron.parser._actions}
    assert [name for name, rule in REFUSED.items() if not rule.flag and name in flags_of] == []


def test_the_gate_of_an_irrelevant_field_is_refused():
    gates = {rule.gate for rule in RULES.values() if isinstance(rule, Irrelevant) and rule.gate}
    assert gates and gates <= REFUSED.keys()


def test_no_field_is_classed_twice():
    with pytest.raises(ValueError, match="classed twice: hidden_size"):
        allowlist_model.merged((allowlist_model.MODEL_RULES, allowlist_model.supported("hidden_size")))


@dataclasses.dataclass
class Newer:
    hidden_dropout: float = 0.0
    brand_new_feature: bool = False
    brand_new_list: list = dataclasses.field(default_factory=list)
    brand_new_size: Optional[int] = None


def test_an_unknown_field_passes_at_its_default():
    assert check_config(Newer()) == []


@pytest.mark.parametrize("name, value, default", [("brand_new_feature", True, "False"), ("brand_new_list", [1], "[]"), ("brand_new_size", 0, "None")])
def test_an_unknown_field_elsewhere_is_refused_by_name(name, value, default):
    (found,) = check_config(Newer(**{name: value}))
    assert str(found).startswith(f"{name} (no flag): found {value}, allowed its default {default}")


def test_an_unknown_field_without_a_default_is_refused():
    kind = dataclasses.make_dataclass("Config", [("brand_new_thing", int)])
    assert [found.name for found in check_config(kind(0))] == ["brand_new_thing"]


def test_an_unknown_field_of_a_subclass_of_the_installed_config_is_refused(megatron):
    base = megatron.classes["TransformerConfig"]
    kind = dataclasses.make_dataclass("ForkConfig", [("fork_feature", bool, False)], bases=(base,))
    settings = dict(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    assert unclassed(kind) == ["fork_feature"] and check_config(kind(**settings)) == []
    assert [found.name for found in check_config(kind(**settings, fork_feature=True))] == ["fork_feature"]


def test_values_that_cannot_be_compared_are_different():
    class Stubborn:
        def __eq__(self, other):
            raise TypeError("no")

    assert [found.name for found in check_config(Newer(brand_new_feature=Stubborn()))] == ["brand_new_feature"]


def test_anything_but_a_dataclass_is_an_error():
    with pytest.raises(TypeError):
        check_config(types.SimpleNamespace(hidden_dropout=0.1))


@pytest.mark.parametrize(
    "line",
    [
        "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --apply-layernorm-1p",
        "--squared-relu --add-qkv-bias --norm-epsilon 1e-6",
        "--quick-geglu --qk-layernorm --qk-l2-norm",
        "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16",
        "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 4 --reset-position-ids",
        "--position-embedding-type yarn --no-rope-freq 2 --attention-output-gate",
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500000 --rotary-interleaved --use-rope-scaling --no-rope-fusion",
        "--position-embedding-type none --transformer-impl local --attention-softmax-in-fp32 --no-masked-softmax-fusion",
        "--fp16 --no-gradient-accumulation-fusion",
        "--fp16 --accumulate-allreduce-grads-in-fp32",
        "--fp16 --memo-tiles 1",
        "--bf16 --attention-backend flash --deterministic-mode",
        "--rampup-batch-size 2 2 8 --micro-batch-size 2 --global-batch-size 8 --eval-micro-batch-size 4 --optimizer sgd --eod-mask-loss",
        "--seq-length 4096",
        "--seq-length 1048576 --no-create-attention-mask-in-dataloader",
        "--memo --memo-attention sdpa --deterministic-mode",
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        "--memo-attention sdpa --hidden-dropout 0.1",
        "--context-parallel-size 2 --cp-comm-type p2p a2a all_gather --memo-allow-untested",
        "--te-rng-tracker",
    ],
)
def test_what_is_supported_passes_on_the_command_line(megatron, line):
    assert [str(found) for found in check_args(arguments(megatron, line))] == []


@pytest.mark.parametrize(
    "line, flag",
    [
        ("--attention-dropout 0.1 --memo-attention fa4", "--attention-dropout"),
        ("--hidden-dropout 0.1 --te-rng-tracker", "--te-rng-tracker"),
        ("--context-parallel-size 2 --memo-attention fa4 --memo-allow-untested", "--context-parallel-size"),
        ("--context-parallel-size 2", "--context-parallel-size"),
        ("--cp-comm-type a2a+p2p", "--cp-comm-type"),
        ("--num-experts 8 --moe-router-topk 1", "--num-experts"),
        ("--optimizer dist_muon", "--optimizer"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
        ("--recompute-activations", "--recompute-activations"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "--recompute-granularity"),
        ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers"),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "--fine-grained-activation-offloading"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "--fp8-format"),
        ("--cuda-graph-impl local", "--cuda-graph-impl"),
        ("--enable-cuda-graph", "--enable-cuda-graph"),
        ("--tp-comm-overlap", "--tp-comm-overlap"),
        ("--multi-latent-attention", "--multi-latent-attention"),
        ("--transformer-impl inference_optimized", "--transformer-impl"),
        ("--sft", "--sft"),
        ("--dataloader-inter-document-masking", "--dataloader-inter-document-masking"),
        ("--reset-attention-mask", "--reset-attention-mask"),
        ("--yaml-cfg run.yaml", "--yaml-cfg"),
        ("--spec some.module layer", "--spec"),
        ("--seq-length 4160", "--no-create-attention-mask-in-dataloader"),
        ("--fp16", "--accumulate-allreduce-grads-in-fp32"),
        ("--bf16 --grad-reduce-in-bf16", "--grad-reduce-in-bf16"),
        ("--deterministic-mode --memo-attention fa4", "--deterministic-mode"),
    ],
)
def test_what_is_not_built_yet_is_refused_on_the_command_line(megatron, line, flag):
    found = check_args(arguments(megatron, line))
    assert [one.flag for one in found] == [flag]
    with pytest.raises(UnsupportedError, match=f"1 setting of this job:\n  {flag}: found"):
        raise_if_any(found)


def test_an_unknown_argument_passes_at_its_default_and_is_refused_elsewhere(megatron):
    defaults = {"seq_length": None, "brand_new": False, "brand_new_list": []}
    args = types.SimpleNamespace(seq_length=128, brand_new=False, brand_new_list=[], of_the_users_script=7)
    assert check_unknown_args(args, defaults) == []
    args.brand_new = True
    (found,) = check_unknown_args(args, defaults)
    assert str(found).startswith("--brand-new: found True, allowed its default False. This argument of the Megatron that runs is unknown")


def test_the_installed_megatrons_defaults_have_no_unknown_argument(megatron):
    from megatron_memo.hooks.training import argument_defaults

    ours = {action.dest for action in flags.add_arguments(argparse.ArgumentParser())._actions} - {"help"}
    defaults = argument_defaults()
    assert defaults.keys() == {action.dest for action in megatron.parser._actions} - ours
    assert unclassed_args(defaults) == []


def test_a_long_mask_is_told_in_bytes(megatron):
    (found,) = check_args(arguments(megatron, "--seq-length 131072"))
    assert "65,536 MiB" in found.found and "131072 tokens" in found.found and "64 MiB" in found.allowed


def test_all_refusals_come_at_once_and_a_shared_flag_once(megatron):
    config = transformer(megatron, qk_clip=True, cpu_offloading_num_layers=1, fp8="hybrid")
    args = arguments(megatron, "--cpu-offloading-num-layers 1 --sft")
    with pytest.raises(UnsupportedError) as error:
        raise_if_any([*check_args(args), *check_config(config)])
    first, *lines = str(error.value).splitlines()
    assert "4 settings" in first
    assert sorted(line.split(":")[0].strip() for line in lines) == ["--cpu-offloading-num-layers", "--fp8-format", "--qk-clip", "--sft"]
