"""Groups on their way to the host and back, on the simulator."""

import pytest
import torch

from megatron_memo.swap.executor import Executor, Group, State
from megatron_memo.swap.simulator import SimulatedStreams
from megatron_memo.swap.slab import HostSlab


class Recorder:
    """Streams that note the calls that allocate, copy or wait."""

    def __init__(self):
        self.streams, self.calls = SimulatedStreams(), []

    def __getattr__(self, name):
        method = getattr(self.streams, name)

        def call(*args):
            self.calls.append((name, *(a for a in args if not isinstance(a, torch.Tensor) and not hasattr(a, "clock"))))
            return method(*args)

        return call


def executor(limit=None, size_bytes=1 << 16):
    recorder = Recorder()
    return Executor(recorder, HostSlab(torch.zeros(size_bytes, dtype=torch.uint8)), limit), recorder


def there_and_back(run, tensors):
    store, group = run.open(1 << 14), Group()
    handles = [group.add(t) for t in tensors]
    run.send(group, store)
    run.settle()
    assert group.state is State.HOST
    run.ready(group, store)
    return group, store, handles


def test_a_tensor_comes_back_as_it_left():
    run, _ = executor(limit=1 << 20)
    tensors = [torch.randn(5, 3), torch.randn(4, 6)[1:, ::2], torch.arange(7), torch.randn(3).to(torch.bfloat16)]
    expected = [t.clone() for t in tensors]
    _, _, handles = there_and_back(run, tensors)
    for handle, tensor in zip(handles, expected):
        assert torch.equal(handle.tensor(), tensor)
        assert handle.tensor().dtype == tensor.dtype


def test_two_views_of_one_storage_are_one_copy():
    run, recorder = executor(limit=1 << 20)
    base = torch.randn(64)
    _, _, (a, b) = there_and_back(run, [base[:32], base[16:]])
    assert sum(call[0] == "copy" for call in recorder.calls) == 2  # one out, one in
    assert a.tensor().untyped_storage().data_ptr() == b.tensor().untyped_storage().data_ptr()


def test_the_sequence_of_allocations_copies_and_waits_repeats():
    run, recorder = executor(limit=1 << 20)
    sequences = []
    for _ in range(3):
        recorder.calls.clear()
        group, store, _ = there_and_back(run, [torch.randn(10), torch.randn(20)])
        run.close(group)
        sequences.append(list(recorder.calls))
    # The first round's slots have no reader to wait for yet.
    assert sequences[1] == sequences[2]
    assert [c for c in sequences[0] if c[0] != "wait"] == [c for c in sequences[1] if c[0] != "wait"]
    assert any(call[0] == "landing" for call in sequences[1])


def test_a_group_that_has_not_left_stays_without_a_copy_in():
    run, recorder = executor(limit=1 << 20)
    store, group = run.open(1 << 14), Group()
    tensor = torch.randn(8)
    handle = group.add(tensor)
    run.send(group, store)
    run.ready(group, store)
    assert handle.tensor().data_ptr() == tensor.data_ptr()
    assert not any(call[0] == "landing" for call in recorder.calls)
    run.settle()
    assert torch.equal(handle.tensor(), tensor)


def test_the_device_keeps_no_more_than_the_limit_waiting_to_leave():
    run, _ = executor(limit=2048)
    store, groups = run.open(1 << 14), [Group() for _ in range(5)]
    for group in groups:
        group.add(torch.randn(256))  # 1024 bytes
        run.send(group, store)
    assert [g.state for g in groups] == [State.HOST] * 3 + [State.LEAVING] * 2


def test_the_block_is_free_once_all_groups_have_been_sent_for():
    run, _ = executor(limit=1 << 20, size_bytes=1 << 14)
    store, groups = run.open(1 << 14), [Group(), Group()]
    for group in groups:
        group.add(torch.randn(8))
        run.send(group, store)
    run.settle()
    run.fetch(groups[0], store)
    assert store.block._slab is not None
    run.fetch(groups[1], store)
    assert run.open(1 << 14).block.read_by is not None


def test_an_activation_that_was_not_fetched_is_an_error_and_not_old_memory():
    run, _ = executor(limit=1 << 20)
    store, group = run.open(1 << 14), Group()
    handle = group.add(torch.randn(8))
    run.send(group, store)
    run.settle()
    with pytest.raises(RuntimeError, match="did not fetch it first"):
        handle.tensor()


def test_measuring_counts_and_copies_nothing():
    recorder = Recorder()
    run = Executor(recorder, None)
    store, group = run.open(0), Group()
    group.add(torch.randn(129))
    run.send(group, store)
    assert store.sent_bytes == 1024
    assert not recorder.calls


def test_a_pass_that_was_measured_to_send_nothing_cannot_send():
    run, _ = executor(limit=1 << 20)
    store, group = run.open(0), Group()
    group.add(torch.randn(8))
    with pytest.raises(RuntimeError, match="measured to send nothing sends 512 bytes"):
        run.send(group, store)


def test_without_a_limit_a_group_may_leave_until_the_settle_after_the_next():
    run, _ = executor()
    store, groups = run.open(1 << 14), [Group() for _ in range(2)]
    for group in groups:
        group.add(torch.randn(8))
        run.send(group, store)
        run.settle()
    assert [g.state for g in groups] == [State.HOST, State.LEAVING]
