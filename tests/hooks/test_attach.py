"""Layers' policies, and what stands as their forward."""

import copy
import pickle

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron_memo.hooks.attach", reason="megatron.core cannot be imported without a GPU here", exc_type=ImportError)

from megatron_memo.config import MemoConfig
from megatron_memo.errors import UnsupportedError
from megatron_memo.hooks import attach


@pytest.mark.parametrize("keep_layers, resident", [(0, []), (1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])])
def test_the_last_layers_are_resident(keep_layers, resident):
    config = MemoConfig(keep_layers=keep_layers)
    assert [index for index in range(4) if attach.policy_of(config, index, 4).resident] == resident


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_a_tiled_layer_is_refused_and_does_not_run_the_originals_parameters(duplicate):
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        duplicate(attach._TiledForward(object(), object()))
