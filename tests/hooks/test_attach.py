"""Which alpha fits, and layers' policies."""


import copy
import pickle

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron_memo.hooks.attach", reason="megatron.core cannot be imported without a GPU here", exc_type=ImportError)

import torch

from megatron_memo.config import MemoConfig
from megatron_memo.errors import HostMemoryError, UnsupportedError
from megatron_memo.hooks import attach
from megatron_memo.swap import host_memory

GIB = 1 << 30


def measured(alpha):
    """A layer whose input and attention output are 2 GiB and whose other activations are 10 GiB."""
    swapped = 2 * GIB + int(alpha * 10 * GIB)
    return attach.Measured(0, swapped, 12 * GIB - swapped, 2 * GIB, swapped)


RESIDENT = attach.Measured(12 * GIB, 0, 0, 2 * GIB, 0)


@pytest.mark.parametrize("budget_gib, expected", [(100, 0.8), (50, 0.8), (45, 0.7), (10, 0.0), (9, None)])
def test_the_largest_alpha_that_fits_is_named(budget_gib, expected):
    config = MemoConfig(alpha=0.8)
    assert attach._alpha_that_fits(budget_gib * GIB, [measured(0.8)] * 5 + [RESIDENT], config) == expected


def test_too_little_host_memory_says_how_much_is_needed_and_there_and_which_alpha_fits():
    config = MemoConfig(alpha=0.8, host_gib=30)
    with pytest.raises(HostMemoryError, match=r"need 50\.000 GiB.*there are 30\.000 GiB.*--memo-alpha 0\.4 fits"):
        attach._host_buffer(50 * GIB, config, [measured(0.8)] * 5 + [RESIDENT], torch.zeros(1))


def test_memory_that_runs_out_while_it_is_taken_names_the_alpha_too(monkeypatch):
    def ran_out(*args, **kwargs):
        raise host_memory.HostMemoryRanOut("no more", 30 * GIB)

    monkeypatch.setattr(attach, "PinnedBuffer", ran_out)
    monkeypatch.setattr(attach, "budget_bytes", lambda *args: host_memory.Budget(None, "nothing", 1))
    with pytest.raises(HostMemoryError, match=r"there are 30\.000 GiB.*no more.*--memo-alpha 0\.4 fits"):
        attach._host_buffer(50 * GIB, MemoConfig(alpha=0.8), [measured(0.8)] * 5 + [RESIDENT], torch.zeros(1))


@pytest.mark.parametrize("keep_layers, resident", [(0, []), (1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])])
def test_the_last_layers_are_resident(keep_layers, resident):
    config = MemoConfig(keep_layers=keep_layers)
    assert [index for index in range(4) if attach.policy_of(config, index, 4).resident] == resident


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_a_tiled_layer_is_refused_and_does_not_run_the_originals_parameters(duplicate):
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        duplicate(attach._TiledForward(object(), object()))
