"""Saving and resuming, stock against --memo: either reads what the other has written, and a run that was stopped ends as one that was not."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="megatron-core is not installed")
sys.path.insert(0, str(Path(__file__).parent))
from training_runs import MEMO, STEPS, make_corpus, train

HALF = STEPS // 2
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
ONE_TILE = "--memo --memo-alpha 0 --memo-tiles 1"  # draws stock's random numbers
FORMATS = {"torch": "--ckpt-format torch", "torch_dist": "--ckpt-format torch_dist", "asynchronous": "--ckpt-format torch_dist --async-save"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "python")


@pytest.fixture(scope="module")
def whole(corpus):
    return train(corpus, DROPOUT)


def stopped(corpus, folder, flags):
    losses, _, output = train(corpus, f"{flags} --save {folder} --save-interval {HALF} --exit-interval {HALF}")
    assert len(losses) == HALF and "successfully saved checkpoint" in output
    return losses


def resumed(corpus, folder, flags):
    losses, evaluations, output = train(corpus, f"{flags} --load {folder}")
    assert re.search(rf"successfully loaded checkpoint from .* at iteration {HALF}\b", output)
    # Megatron's second line after a start is the mean of two steps.
    return [losses[0], 2 * losses[1] - losses[0], *losses[2:]], evaluations


def assert_second_half(whole, resumed):
    assert len(resumed[0]) == HALF
    for expected, found in zip(whole[0][HALF:] + whole[1][1:], resumed[0] + resumed[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_stock_goes_on_from_memos_checkpoint_and_memo_from_stocks_with_the_losses_of_a_run_not_stopped(corpus, whole, tmp_path, form):
    flags = f"{DROPOUT} {FORMATS[form]}"
    first = stopped(corpus, tmp_path / "memo", f"{flags} {ONE_TILE}")
    assert first == whole[0][:HALF] == stopped(corpus, tmp_path / "stock", flags)
    assert_second_half(whole, resumed(corpus, tmp_path / "memo", flags))
    assert_second_half(whole, resumed(corpus, tmp_path / "stock", f"{flags} {ONE_TILE}"))


def test_a_resumed_run_with_mixed_tiles_and_dropout_ends_as_one_that_was_not_stopped(corpus, tmp_path):
    flags = f"{DROPOUT} {MEMO}"
    stopped(corpus, tmp_path, flags)
    assert_second_half(train(corpus, flags), resumed(corpus, tmp_path, flags))
