"""MEMO inside Megatron's training loop: the hooks, and what they call."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .. import flags
from .seams import Hook


@dataclass(frozen=True)
class Callbacks:
    """What the training loop's events lead to.

    Attributes:
        parsed: Megatron's namespace, as soon as the command line is parsed and before it is validated.
        ready: the list of model chunks, once model, optimizer and checkpoint are loaded.
        stepped: iteration (from 1), loss or None, time_ms of a training step that has ended.
        ended: training is over, well or not.
    """

    parsed: Callable[[Any], None]
    ready: Callable[[Any], None]
    stepped: Callable[[int, Optional[float], float], None]
    ended: Callable[[], None]


def argument_hook(callbacks: Callbacks) -> Hook:
    """Megatron's parser knows our flags."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
            def provider(parser: Any) -> Any:
                parser = extra_args_provider(parser) if extra_args_provider is not None else parser
                return flags.add_arguments(parser)

            args = original(provider, ignore_unknown_args)
            callbacks.parsed(args)
            return args

        return parse_args

    return Hook(
        target="megatron.training.arguments:parse_args",
        replacement=replacement,
        reason="the --memo flags are parsed with Megatron's own, and what a CPU needs is set before validation",
        parameters=("extra_args_provider", "ignore_unknown_args"),
    )


def training_hooks(callbacks: Callbacks) -> Tuple[Hook, ...]:
    """The training loop's start, steps and end."""

    def setup(original: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            callbacks.ready(result[0])
            return result

        return setup_model_and_optimizer

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        count = 0

        def train_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            begin = time.perf_counter()
            result = original(*args, **kwargs)
            loss = _loss(result[0])
            count += 1
            callbacks.stepped(_iteration() or count, loss, (time.perf_counter() - begin) * 1e3)
            return result

        return train_step

    def loop(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                callbacks.ended()

        return train

    module = "megatron.training.training"
    return (
        Hook(f"{module}:setup_model_and_optimizer", setup, "the layers are replaced once model and checkpoint are loaded", None),
        Hook(f"{module}:train_step", step, "step times, losses and stalls go into the report", ("forward_step_func", "data_iterator", "model")),
        Hook(f"{module}:train", loop, "the report is written when training ends, also by an error", ("forward_step_func", "model", "optimizer")),
    )


def _loss(loss_dict: Any) -> Optional[float]:
    """The language model's loss of a step, or None on ranks that do not have it."""
    value = loss_dict.get("lm loss") if isinstance(loss_dict, dict) else None
    if isinstance(value, torch.Tensor):
        return float(value.reshape(-1)[0])
    return None if value is None else float(value)


def _iteration() -> Optional[int]:
    from megatron.training import get_args

    current = getattr(get_args(), "curr_iteration", None)
    return None if current is None else current + 1


def megatron_args() -> Any:
    """Megatron's validated arguments."""
    from megatron.training import get_args

    return get_args()


def argument_defaults() -> Dict[str, Any]:
    """The defaults of Megatron's own arguments, by destination: not those of the script that runs."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {action.dest: action.default for action in parser._actions}


def print_once(text: str) -> None:
    """Prints on rank 0."""
    from megatron.training import print_rank_0

    print_rank_0(text)
