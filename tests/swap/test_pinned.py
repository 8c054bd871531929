"""The host buffer: what it takes, gives back, refuses, and hides from forked processes. No GPU: a made-up CUDA runtime stands in."""

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_memo.errors import HostMemoryError
from megatron_memo.swap import numa, pinned
from megatron_memo.swap.host_memory import GIB, HostMemoryRanOut
from megatron_memo.swap.pinned import PinnedBuffer

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent.parent


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def plenty():
    return 1 << 50


class Cudart:
    """Notes the calls, and whether the memory was there at each."""

    def __init__(self, code=0):
        self.code, self.calls = code, []

    def cudaHostRegister(self, address, size_bytes, flags):
        self.calls.append(("register", address, size_bytes, is_mapped(address)))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address, None, is_mapped(address)))
        return 0

    def cudaGetErrorString(self, code):
        return "out of memory"


def test_the_tensor_covers_the_buffer_and_holds_what_is_written():
    with PinnedBuffer(5 * MIB + 3, pin=False) as buffer:
        assert buffer.tensor.shape == (5 * MIB + 3,) and buffer.tensor.dtype == torch.uint8
        assert buffer.tensor.count_nonzero() == 0
        buffer.tensor[-3:] = 7
        assert ctypes.string_at(buffer.tensor.data_ptr() + 5 * MIB, 3) == b"\7\7\7"
        assert buffer.tensor.data_ptr() % (2 * MIB) == 0


def test_a_size_beyond_32_bits_is_neither_copied_nor_cut(monkeypatch):
    monkeypatch.setattr(pinned, "_touch", lambda region, threads, before: None)
    size_bytes, before = 5 * GIB + 1, resident_bytes()
    with PinnedBuffer(size_bytes, pin=False) as buffer:
        buffer.tensor[-1] = 9
        buffer.tensor[2**32] = 8
        assert buffer.tensor.numel() == size_bytes
        assert ctypes.string_at(buffer.tensor.data_ptr() + 2**32, 1) == b"\10"
        assert ctypes.string_at(buffer.tensor.data_ptr() + size_bytes - 1, 1) == b"\11"
        assert resident_bytes() - before < 64 * MIB


def test_zero_bytes_are_a_buffer():
    cudart = Cudart()
    with PinnedBuffer(0, pin=True, cudart=cudart) as buffer:
        assert buffer.tensor.numel() == 0
    buffer.close()
    assert cudart.calls == []


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="found -1"):
        PinnedBuffer(-1, pin=False)


@pytest.mark.parametrize("advice", [23, 9999], ids=["populate", "kernel-without-populate"])
@pytest.mark.parametrize("threads", [1, 3, 16])
def test_every_page_has_memory_and_close_returns_it(monkeypatch, advice, threads):
    monkeypatch.setattr(pinned, "_MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 16 * MIB)
    PinnedBuffer(MIB, pin=False, threads=threads).close()  # the threads' own memory
    before = resident_bytes()
    buffer = PinnedBuffer(90 * MIB, pin=False, threads=threads)
    # The kernel counts resident pages by thread and adds them up late, up to 64 pages a thread.
    assert 84 * MIB <= resident_bytes() - before < 100 * MIB
    address = buffer.tensor.data_ptr()
    buffer.close()
    assert not is_mapped(address) and resident_bytes() - before < 8 * MIB
    buffer.close()
    assert buffer.tensor.numel() == 0


def test_a_dropped_buffer_returns_its_memory_after_its_last_view():
    cudart = Cudart()
    buffer = PinnedBuffer(4 * MIB, pin=True, cudart=cudart)
    view, address = buffer.tensor[MIB : 2 * MIB], buffer.tensor.data_ptr()
    gc.disable()
    try:
        del buffer
        view.fill_(3)
        assert is_mapped(address) and [call[0] for call in cudart.calls] == ["register"]
        del view
        assert not is_mapped(address) and [call[0] for call in cudart.calls] == ["register", "unregister"]
    finally:
        gc.enable()


def test_the_buffer_is_registered_whole_in_one_call_and_unregistered_before_it_is_unmapped():
    cudart = Cudart()
    buffer = PinnedBuffer(9 * MIB + 5, pin=True, cudart=cudart)
    address = buffer.tensor.data_ptr()
    buffer.close()
    buffer.close()
    assert cudart.calls == [("register", address, 10 * MIB, True), ("unregister", address, None, True)]
    assert not is_mapped(address)


def test_without_pinning_cuda_is_not_asked():
    cudart = Cudart()
    PinnedBuffer(MIB, pin=False, cudart=cudart).close()
    assert cudart.calls == []


def test_a_refused_registration_is_explained_and_leaves_nothing():
    cudart, before = Cudart(code=2), resident_bytes()
    with pytest.raises(HostMemoryError, match=r"could not pin 0\.062 GiB.*error 2, out of memory.*ulimit -l: (unlimited|[0-9.]+ GiB)"):
        PinnedBuffer(64 * MIB, pin=True, cudart=cudart)
    ((call, address, _, _),) = cudart.calls  # what was never registered is not unregistered
    assert call == "register" and not is_mapped(address)
    assert resident_bytes() - before < 8 * MIB


def test_a_mapping_that_the_system_refuses_is_explained():
    with pytest.raises(HostMemoryError, match="cannot be mapped"):
        PinnedBuffer(1 << 60, pin=False)


def test_memory_that_runs_out_is_refused_with_numbers_and_given_back(monkeypatch):
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 16 * MIB)
    asked = []

    def available():
        asked.append(resident_bytes())
        return 32 * MIB if len(asked) <= 3 else 31 * MIB

    before = resident_bytes()
    with pytest.raises(HostMemoryRanOut, match=r"0\.250 GiB are needed.*each of 1 local ranks, 0\.047 GiB were taken by this one, 0\.030 GiB are free") as caught:
        PinnedBuffer(256 * MIB, pin=False, available_bytes=available, patience_s=0.02, local_ranks=1)
    assert asked[3] - before >= 48 * MIB  # three chunks were there
    assert resident_bytes() - before < 8 * MIB
    assert caught.value.there_bytes == (48 + 31 - 16) * MIB


def test_memory_that_grows_while_it_is_waited_for_is_taken(monkeypatch):
    monkeypatch.setattr(pinned, "_POLL_S", 0.001)
    monkeypatch.setattr(pinned, "_GROWTH_BYTES", 1 * MIB)
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(pinned, "time", types.SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now, sleep=lambda s: None))

    def available():
        clock.now += 0.9  # each look takes most of the patience
        return int(clock.now * 2 * MIB)

    with PinnedBuffer(8 * MIB, pin=False, available_bytes=available, patience_s=1.0, local_ranks=1) as buffer:
        assert buffer.tensor.numel() == 8 * MIB
    assert clock.now > 7


def test_growth_that_is_only_noise_does_not_prolong_the_wait(monkeypatch):
    monkeypatch.setattr(pinned, "_POLL_S", 0.001)
    looks = []

    def available():
        looks.append(None)
        return len(looks)

    with pytest.raises(HostMemoryRanOut):
        PinnedBuffer(64 * MIB, pin=False, available_bytes=available, patience_s=0.02, local_ranks=1)


def test_other_ranks_next_chunks_are_left_room_for(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(HostMemoryRanOut, match="each of 8 local ranks"):
        PinnedBuffer(2 * MIB, pin=False, available_bytes=lambda: 18 * MIB - 1, patience_s=0.0)
    PinnedBuffer(2 * MIB, pin=False, available_bytes=lambda: 18 * MIB, patience_s=0.0).close()


def test_a_refusal_of_the_kernel_is_an_error_and_not_a_touch():
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        pinned._populate(4096, 4096)  # nothing is mapped so low; touching it would end the process


def test_times_of_the_phases_are_told():
    with PinnedBuffer(4 * MIB, pin=True, cudart=Cudart()) as buffer:
        assert set(buffer.phase_s) == {"map", "touch", "register"} and min(buffer.phase_s.values()) > 0


FORK = """
import ctypes, mmap, os, sys
from megatron_memo.swap.pinned import PinnedBuffer

def status_of(child):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    return os.waitpid(pid, 0)[1]

class Cudart:
    unregistered = 0
    def cudaHostRegister(self, *_): return 0
    def cudaHostUnregister(self, *_): Cudart.unregistered += 1

buffer = PinnedBuffer(4 << 20, pin=True, cudart=Cudart())
buffer.tensor.fill_(5)
plain = mmap.mmap(-1, 1 << 20)
address = buffer.tensor.data_ptr()

def closes():
    buffer.close()
    os._exit(10 + Cudart.unregistered)

statuses = [status_of(lambda: plain.write(b"x")), status_of(lambda: ctypes.memset(address, 1, 1)), status_of(closes)]
assert int(buffer.tensor.min()) == int(buffer.tensor.max()) == 5
buffer.close()
print(*(os.WTERMSIG(s) if os.WIFSIGNALED(s) else -os.WEXITSTATUS(s) for s in statuses), Cudart.unregistered)
"""


def test_a_forked_child_has_none_of_it_and_cannot_give_it_back():
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # A child touches an ordinary mapping; dies of touching ours; closes ours without unregistering it. The parent then unregisters once.
    assert done.stdout.split() == ["0", str(int(signal.SIGSEGV)), "-10", "1"]


def test_a_gpus_node_is_read_where_there_is_more_than_one(tmp_path):
    pci = numa.pci_address(types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0))
    assert pci == "0000:9b:00.0"
    device, nodes = tmp_path / "sys/bus/pci/devices" / pci, tmp_path / "sys/devices/system/node"
    (nodes / "node0").mkdir(parents=True)
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert numa.node_of(pci, str(tmp_path)) is None
    (nodes / "node1").mkdir()
    assert numa.node_of(pci, str(tmp_path)) == 1
    assert numa.node_of("0000:00:00.0", str(tmp_path)) is None
    assert numa.node_of(None, str(tmp_path)) is None
    (device / "numa_node").write_text("-1\n")
    assert numa.node_of(pci, str(tmp_path)) is None


def test_an_older_torch_tells_no_pci_address():
    assert numa.pci_address(types.SimpleNamespace(pci_bus_id=1)) is None


def test_the_kernel_takes_the_preferred_node_for_exactly_the_buffer():
    allowed = next((line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Mems_allowed_list:")), None)
    if allowed is None or not Path("/proc/self/numa_maps").exists():
        pytest.skip("a kernel without NUMA")
    node = int(allowed.replace("-", ",").split(",")[0])
    with PinnedBuffer(4 * MIB, pin=False) as buffer:
        address = buffer.tensor.data_ptr()
        assert not numa.prefer(address, 4 * MIB, None)
        if not numa.prefer(address, 4 * MIB, node):
            assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), os.strerror(ctypes.get_errno())
            pytest.skip("mbind is not allowed here")
        policies = {int(line.split()[0], 16): line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
        assert policies[address].startswith("prefer") and policies[address].endswith(f":{node}")
        assert sum(policy.startswith("prefer") for policy in policies.values()) == 1
        assert f"{address:x}-{address + 4 * MIB:x} " in Path("/proc/self/maps").read_text()
