"""Peak bytes of live activations in a training step, counted the same way for stock and tiled runs.

Memory statistics of a device exist on GPUs only, and mix activations with weights and with what the allocator keeps in reserve. This meter
sees every operation and adds up the storages that operations make, from the moment an operation returns one until its last reference is gone.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FILE_VARIABLE = "MEMO_LIVE_BYTES"
STEPS_VARIABLE = "MEMO_LIVE_BYTES_STEPS"
DEFAULT_STEPS = (3, 4)
METHOD = (
    "largest sum of the sizes of live storages that torch operations made between two optimizer steps; weights, gradient buffers, optimizer state, "
    "host memory of swapped activations, and scratch memory inside an operation are not in it"
)


class LiveBytes(TorchDispatchMode):
    """While entered, counts the storages that operations make. Each operation takes longer: do not time steps with it.

    A storage counts once, whatever shares it. Storages that an operation only passes on (views, in-place results) do not count, so nothing that
    existed before does. The autograd engine carries the mode into its own threads.

    Attributes:
        live_bytes: bytes of counted storages that are alive now.
        peak_bytes: the largest live_bytes since the start or :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        # id of a live storage: the weak reference that tells of its end, and its bytes.
        self._known: Dict[int, Tuple[Any, int]] = {}
        # Storages end in whatever thread drops them, also while this one holds the lock.
        self._lock = threading.RLock()

    def reset_peak(self) -> None:
        """The peak starts again from what is alive now."""
        with self._lock:
            self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if id(storage) in self._known or id(storage) not in given:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Adds a new storage; corrects the size of a known one."""
        key, size_bytes = id(storage), storage.nbytes()
        with self._lock:
            reference, old_bytes = self._known.get(key, (None, 0))
            if reference is None:
                reference = weakref.ref(storage, lambda _: self._end(key))
            self._known[key] = (reference, size_bytes)
            self.live_bytes += size_bytes - old_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _end(self, key: int) -> None:
        with self._lock:
            self.live_bytes -= self._known.pop(key)[1]


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors, and the bare storages, in ``tree``."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.UntypedStorage):
            yield leaf
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            try:
                yield leaf.untyped_storage()
            except NotImplementedError:  # a wrapper: the tensors that it stands for are seen on their own
                pass


class StepMeter:
    """Counts in the training steps ``steps`` (from 1) and hands each one's peak to ``write``.

    The optimizer's step is not counted: a training step is metered from the end of one optimizer step to the beginning of the next, told by torch's
    hooks, which know any optimizer. Several optimizers that step one after the other are one step as long as they are the same ones each time.
    """

    def __init__(self, steps: Tuple[int, ...], write: Callable[[Dict[int, int]], None]) -> None:
        self.steps, self._write = steps, write
        self.peaks: Dict[int, int] = {}
        self._meter: Optional[LiveBytes] = None
        self._step = 1
        self._first: Optional[weakref.ref] = None
        self._handles: List[Any] = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Stops counting and takes the hooks away. Calling it twice does nothing."""
        self._stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._meter is None:
            return
        self.peaks[self._step] = max(self._meter.peak_bytes, self.peaks.get(self._step, 0))
        self._stop()
        self._write(dict(self.peaks))

    def _after(self, optimizer: Any, *_: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._step += 1
        if self._step > max(self.steps):
            self.close()
        elif self._step in self.steps:
            self._meter = LiveBytes()
            self._meter.__enter__()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None


def read_steps(text: str) -> Tuple[int, ...]:
    """ "3,4" as (3, 4). Raises ValueError for anything but whole numbers from 2: what step 1 makes includes what stays."""
    try:
        steps = tuple(int(part) for part in text.split(","))
    except ValueError:
        steps = ()
    if not steps or min(steps) < 2:
        raise ValueError(f"{STEPS_VARIABLE}: expected training steps from 2, as in 3,4; found {text!r}.")
    return steps


def file_of_rank(path: str, rank: int) -> Path:
    """Rank 0 writes ``path`` itself, another one ``path``.rankN."""
    return Path(path if rank == 0 else f"{path}.rank{rank}")


def write_file(path: Path, peaks: Dict[int, int]) -> None:
    """Writes peak_bytes, peak_bytes_by_step and method as JSON, whole or not at all."""
    content = {"peak_bytes": max(peaks.values()), "peak_bytes_by_step": {str(step): size for step, size in peaks.items()}, "method": METHOD}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def install_from_environment() -> Optional[StepMeter]:
    """Starts the meter that MEMO_LIVE_BYTES=FILE asks for; None when it is not set. MEMO_LIVE_BYTES_STEPS=3,4 names the training steps.

    The file holds ``peak_bytes``, ``peak_bytes_by_step`` and ``method``, and is written at the end of each metered step. Raises ValueError for bad steps.
    """
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return None
    steps = read_steps(os.environ[STEPS_VARIABLE]) if os.environ.get(STEPS_VARIABLE) else DEFAULT_STEPS
    target = file_of_rank(path, int(os.environ.get("RANK", "0")))
    return StepMeter(steps, lambda peaks: write_file(target, peaks))
