"""Temporary: essential refusals only, until the full table lands."""
from ..errors import UnsupportedError


def _find(thing):
    bad = []
    for name, allowed, flag in (
        ("hidden_dropout", 0.0, "--hidden-dropout"), ("attention_dropout", 0.0, "--attention-dropout"),
        ("pipeline_model_parallel_size", 1, "--pipeline-model-parallel-size"), ("context_parallel_size", 1, "--context-parallel-size"),
        ("use_distributed_optimizer", False, "--use-distributed-optimizer"), ("num_moe_experts", None, "--num-experts"),
    ):
        if hasattr(thing, name) and getattr(thing, name) != allowed:
            bad.append(f"{flag}: found {getattr(thing, name)}, allowed {allowed}")
    return bad


check_args = check_config = _find


def raise_if_any(refusals):
    if refusals:
        raise UnsupportedError("--memo does not support: " + "; ".join(map(str, refusals)))
