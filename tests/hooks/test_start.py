"""What start.py reads out of Megatron's arguments."""

import types

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture
def start(monkeypatch):
    from megatron_memo.hooks import start

    monkeypatch.setattr(start.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    return start


def schedule(start, **settings):
    args = types.SimpleNamespace(**{"micro_batch_size": 2, "data_parallel_size": 4, "global_batch_size": 8, **settings})
    config = types.SimpleNamespace(pipeline_model_parallel_size=4, microbatch_group_size_per_vp_stage=None)
    return start.schedule_of([types.SimpleNamespace(config=config)], args)


def test_the_schedule_has_the_micro_batches_of_a_rank(start):
    assert schedule(start).micro_batches == schedule(start, step_batch_size_schedule=None).micro_batches == 1
    assert schedule(start, global_batch_size=64).micro_batches == 8


@pytest.mark.parametrize("steps, largest", [("0:16 1M:128 2M:64", 128), ("0:16,250B:0.5K", 500), ("0:8 1k:1M", 1_000_000)])
def test_the_largest_batch_that_is_scheduled_counts(start, steps, largest):
    found = schedule(start, step_batch_size_schedule=steps)
    assert found.micro_batches == largest // 8 and found.in_flight() == 4
