"""The meter of live bytes, on sequences whose peak is known."""

import json
import threading

import pytest
import torch

from megatron_memo.report import live_bytes
from megatron_memo.report.live_bytes import LiveBytes, StepMeter, file_of_rank, read_steps

KIB = 1024


def block(kib=1):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_a_storage_is_subtracted_as_soon_as_its_last_reference_is_gone():
    with LiveBytes() as meter:
        a = block(3)
        b = block(2)
        assert meter.live_bytes == 5 * KIB
        del a
        assert meter.live_bytes == 2 * KIB
        c = block(1)
        del b, c
        assert (meter.live_bytes, meter.peak_bytes) == (0, 5 * KIB)


def test_views_and_in_place_results_are_not_counted_again():
    with LiveBytes() as meter:
        a = block(4)
        view = a[: 2 * KIB].view(2, KIB).t()
        a.add_(1)
        assert meter.live_bytes == 4 * KIB
        del a
        assert meter.live_bytes == 4 * KIB
        del view
        assert meter.live_bytes == 0


def test_what_existed_before_is_not_counted():
    before = block(8)
    host = torch.frombuffer(bytearray(8 * KIB), dtype=torch.uint8)
    with LiveBytes() as meter:
        kept = [before.view(2, -1), before.detach(), before.mul_(2), host[:KIB], host[KIB : 2 * KIB].copy_(before[:KIB])]
        assert meter.peak_bytes == 0
    assert len(kept) == 5


def test_what_only_the_graph_holds_is_live_until_its_backward_pass():
    x = torch.ones(KIB, dtype=torch.float32, requires_grad=True)
    with LiveBytes() as meter:
        y = (x * 2).exp().exp()
        # Both results of exp are saved for the backward pass, the last one is y; nothing keeps x * 2.
        assert meter.live_bytes == 2 * 4 * KIB
        y.backward(torch.ones_like(y))
        del y
        assert meter.live_bytes == 4 * KIB  # the gradient of x
        x.grad = None
        assert meter.live_bytes == 0
        assert meter.peak_bytes >= 3 * 4 * KIB


def test_storages_dropped_by_another_thread_are_subtracted():
    with LiveBytes() as meter:
        held = [block(1) for _ in range(64)]
        threads = [threading.Thread(target=lambda part: part.clear(), args=(part,)) for part in (held[:32], held[32:])]
        held.clear()
        for thread in threads:
            thread.start()
            thread.join()
        del threads, thread
        assert (meter.live_bytes, meter.peak_bytes) == (0, 64 * KIB)


def test_nothing_is_counted_after_the_end_but_what_was_counted_is_subtracted():
    with LiveBytes() as meter:
        a = block(2)
    b = block(4)
    assert meter.live_bytes == 2 * KIB
    del a, b
    assert meter.live_bytes == 0


def train(meter_steps, written, steps=5, optimizers=1):
    """Each step makes ``step`` KiB and drops them; returns the meter."""
    weights = [torch.zeros(4, requires_grad=True) for _ in range(optimizers)]
    made = [torch.optim.AdamW([w]) for w in weights]
    meter = StepMeter(meter_steps, written.append)
    for step in range(1, steps + 1):
        activation = block(step)
        del activation
        for w, optimizer in zip(weights, made):
            w.grad = torch.zeros(4)
            optimizer.step()
    return meter


@pytest.mark.parametrize("optimizers", [1, 2])
def test_each_chosen_step_has_its_own_peak(optimizers):
    written = []
    meter = train((3, 4), written, optimizers=optimizers)
    try:
        assert {step: size // KIB for step, size in written[-1].items()} == {3: 3, 4: 4}
        assert meter.peaks == written[-1]
    finally:
        meter.close()


def test_after_the_last_chosen_step_no_mode_and_no_hook_is_left():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stack

    hooks = torch.optim.Optimizer.__init__.__globals__
    before = len(hooks["_global_optimizer_pre_hooks"]), len(hooks["_global_optimizer_post_hooks"])
    train((3, 4), [])
    assert (len(hooks["_global_optimizer_pre_hooks"]), len(hooks["_global_optimizer_post_hooks"])) == before
    assert stack() == []


def test_the_environment_names_file_and_steps(tmp_path, monkeypatch):
    path = tmp_path / "bytes.json"
    monkeypatch.setenv("MEMO_LIVE_BYTES", str(path))
    monkeypatch.setenv("MEMO_LIVE_BYTES_STEPS", "2")
    monkeypatch.delenv("RANK", raising=False)
    meter = live_bytes.install_from_environment()
    w = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for kib in (7, 5, 9):
        activation = block(kib)
        del activation
        w.grad = torch.zeros(4)
        optimizer.step()
    meter.close()
    content = json.loads(path.read_text())
    assert content["peak_bytes"] // KIB == 5
    assert list(content["peak_bytes_by_step"]) == ["2"]
    assert content["method"] == live_bytes.METHOD
    assert [p.name for p in tmp_path.iterdir()] == ["bytes.json"]


def test_without_the_variable_nothing_is_installed(monkeypatch):
    monkeypatch.delenv("MEMO_LIVE_BYTES", raising=False)
    assert live_bytes.install_from_environment() is None


@pytest.mark.parametrize("text", ["1,2", "", "three", "3,,4"])
def test_steps_that_cannot_be_metered_are_refused(text):
    with pytest.raises(ValueError, match="MEMO_LIVE_BYTES_STEPS"):
        read_steps(text)


def test_every_rank_has_its_own_file():
    assert [str(file_of_rank("a.json", rank)) for rank in (0, 3)] == ["a.json", "a.json.rank3"]
