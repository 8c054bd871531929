"""The whole flow of a run, in order:

    command line -> (CPU set-up) -> hooks -> model is built -> what is unsupported is refused -> attention is checked -> the layer is checked
    -> one forward pass of one layer is measured -> host memory is taken -> the layers are replaced -> steps -> report
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, List, Optional, Set

from . import flags
from .config import MemoConfig
from .errors import ConfigError, UnsupportedError

_INSTALLED: Optional["Runtime"] = None


class Runtime:
    """MEMO in one process. Made by :func:`enable` or :func:`install_argument_hook`."""

    def __init__(self, config: MemoConfig) -> None:
        self.config = config
        self.session: Any = None
        self._said: Set[str] = set()
        self._parsed = self._saw_model = False
        self._installations: List[Any] = []

    # Hooks

    def install(self, parse: bool) -> None:
        """Installs the hooks that ``config`` asks for. ``parse``: Megatron has yet to parse the command line."""
        from .hooks import seams, training

        callbacks = training.Callbacks(self.parsed, self.ready, self.stepped, self.ended)
        hooks = [training.argument_hook(callbacks)] if parse else []
        if self.config.enabled:
            hooks += training.training_hooks(callbacks)
        self._installations.append(seams.install(hooks))

    def uninstall(self) -> None:
        """Stock Megatron again."""
        global _INSTALLED
        if self.session is not None:
            self.session.detach()
            self.session = None
        for installation in reversed(self._installations):
            installation.uninstall()
        self._installations.clear()
        _INSTALLED = None

    def warn_if_unused(self) -> None:
        """At exit: a job that asked for --memo and trained stock must not look like any other."""
        if self._parsed and not self._saw_model and self._installations and not hasattr(sys, "last_value"):
            _unused(os.environ.get("RANK", "0"))

    # Events of the training loop

    def parsed(self, args: Any) -> None:
        """The command line is parsed, not validated."""
        if self.config.cpu:
            from . import cpu

            self._say(args.rank, f"--memo-cpu: set {', '.join(cpu.prepare_args(args))}")
        if self.config.enabled:
            from .hooks import allowlist, seams, training, versions

            remark = versions.remark(seams.megatron_version())
            if remark:
                self._say(args.rank, f"--memo: {remark}")
            allowlist.raise_if_any([*allowlist.check_args(args), *allowlist.check_unknown_args(args, training.argument_defaults())])
            if self.config.report_dir is not None:
                from .report.writer import make_directory

                make_directory(self.config.report_dir)
        self._parsed = True

    def _say(self, rank: int, line: str) -> None:
        """Prints ``line`` once, on rank 0: Megatron parses its command line more than once."""
        if rank == 0 and line not in self._said:
            self._said.add(line)
            print(line, flush=True)

    def ready(self, chunks: Any) -> None:
        """The model stands, with its weights loaded."""
        import torch

        from .hooks import allowlist, attach, capture, random_state, start, training

        self._saw_model = True
        args = training.megatron_args()
        if self.session is not None:
            raise UnsupportedError("--memo: a second model was set up in this process; it tiles one. Set the other one up before enabling, or train without --memo.")
        models = [capture.unwrapped(chunk) for chunk in chunks]
        allowlist.raise_if_any([*allowlist.check_args(args), *allowlist.check_config(models[0].config)])
        first_layer = capture.layers_of(models[0])[0]
        device = next(first_layer.parameters()).device
        with capture.unsynchronised(chunks), random_state.preserved():
            attend = start.checked_attention(first_layer, self.config, args, device)
            checked = start.check_layers(models, args, device, attend)
            tokens, micro_batch = start.tokens_of_rank(args), args.micro_batch_size
            parts = [
                attach.Chunk(capture.layers_of(m), *capture.first_call(m, tokens, micro_batch, device), not m.pre_process, m.post_process)
                for m in models
            ]
            self.session = attach.attach_chunks(parts, self.config, schedule=start.schedule_of(models, args), attend=attend)
            del parts
        if device.type == "cuda":
            torch.cuda.empty_cache()
        training.print_once(start.summary(self.session, checked))

    def stepped(self, iteration: int, loss: Optional[float], time_ms: float) -> None:
        """A training step has ended."""
        if self.session is not None:
            self.session.end_step(iteration=iteration, loss=loss, time_ms=round(time_ms, 3))

    def ended(self) -> None:
        """Training is over: the report is written."""
        if self.session is not None and self.config.report_dir is not None:
            from .report.writer import write_report

            write_report(self.config.report_dir, int(os.environ.get("RANK", "0")), self.session.report())


def _unused(rank: str) -> None:
    if rank == "0":
        print(
            "megatron_memo: --memo was given, but no model was set up through megatron.training's setup_model_and_optimizer, so nothing was tiled. "
            "With a training loop of your own call megatron_memo.hooks.attach.attach().",
            file=sys.stderr,
        )


def install_argument_hook(config: MemoConfig) -> Runtime:
    """For launchers: hooks that parse the flags themselves and install the rest of what ``config`` asks for. Megatron must be importable."""
    return _start(config, parse=True)


def enable(args: Any) -> Optional[Runtime]:
    """For scripts with a parsed namespace: installs what its --memo flags ask for; None when they ask for nothing."""
    config = flags.config_from_args(args)
    if not (config.enabled or config.cpu):
        return None
    runtime = _start(config, parse=False)
    try:
        runtime.parsed(args)
    except BaseException:
        runtime.uninstall()
        raise
    return runtime


def _start(config: MemoConfig, parse: bool) -> Runtime:
    global _INSTALLED
    if _INSTALLED is not None:
        raise ConfigError("megatron_memo is already enabled in this process. Call uninstall() on what enable() returned before enabling it again.")
    runtime = Runtime(config)
    runtime.install(parse)
    _INSTALLED = runtime
    if config.enabled:
        atexit.register(runtime.warn_if_unused)
    return runtime
