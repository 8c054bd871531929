"""What a rank's passes need of the host's memory, and which alpha fits."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron_memo.hooks.host_share", reason="megatron.core cannot be imported without a GPU here", exc_type=ImportError)

import torch

from megatron_memo.config import MemoConfig
from megatron_memo.errors import HostMemoryError
from megatron_memo.hooks import host_share
from megatron_memo.hooks.host_share import Measured, host_buffer
from megatron_memo.swap import host_memory
from megatron_memo.swap.schedule import Schedule

GIB = 1 << 30
CPU = torch.device("cpu")
RESIDENT = Measured(12 * GIB, 0, 0, 2 * GIB, 10 * GIB)


def measured(alpha):
    """A layer whose input and attention output are 2 GiB and whose other activations are 10 GiB."""
    swapped = 2 * GIB + int(alpha * 10 * GIB)
    return Measured(0, swapped, 12 * GIB - swapped, 2 * GIB, 10 * GIB)


def model(alpha=0.8):
    return [[measured(alpha)] * 5 + [RESIDENT]]


@pytest.mark.parametrize("there_gib, advice", [(45, "--memo-alpha 0.7 fits"), (30, "--memo-alpha 0.4 fits"), (10, "--memo-alpha 0 fits"), (9, "No --memo-alpha fits")])
def test_too_little_host_memory_says_how_much_is_needed_and_there_and_which_alpha_fits(there_gib, advice):
    with pytest.raises(HostMemoryError, match=rf"need 50.000 GiB.*there are {there_gib}.000 GiB.*{advice}"):
        host_buffer(model(), Schedule(), MemoConfig(alpha=0.8, host_gib=there_gib), CPU)


def test_passes_in_flight_of_a_pipeline_stage_are_counted():
    with pytest.raises(HostMemoryError, match=r"need 100.000 GiB.*there are 60.000 GiB.*--memo-alpha 0.4 fits"):
        host_buffer(model(), Schedule(stages=2, stage=0, micro_batches=4), MemoConfig(alpha=0.8, host_gib=60), CPU)


def test_memory_that_runs_out_while_it_is_taken_names_the_alpha_too(monkeypatch):
    def ran_out(*args, **kwargs):
        raise host_memory.HostMemoryRanOut("no more", 30 * GIB)

    monkeypatch.setattr(host_share, "PinnedBuffer", ran_out)
    monkeypatch.setattr(host_share, "budget_bytes", lambda *args: host_memory.Budget(None, "nothing", 1))
    with pytest.raises(HostMemoryError, match=r"there are 30.000 GiB.*no more.*--memo-alpha 0.4 fits"):
        host_buffer(model(), Schedule(), MemoConfig(alpha=0.8), CPU)
