"""How much host memory a rank may take, on made-up machines."""

import pytest

from megatron_memo.errors import HostMemoryError
from megatron_memo.swap import host_memory
from megatron_memo.swap.host_memory import GIB, Budget, HostLimits, budget_bytes, free_bytes, read_limits, shortage_error

V1_UNLIMITED = 9223372036854771712
MOUNT_V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"
MOUNT_V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"


class Machine:
    """A root folder with what the kernel would show."""

    def __init__(self, root, total_gib=128, available_gib=100):
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n")

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))

    def in_group(self, line, mount=None):
        self.write("proc/self/cgroup", line + "\n")
        if mount is not None:
            self.write("proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n" + mount + "\n")

    def v2(self, group, limit="max", used=0, inactive=0, active=0, high=None):
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\nfile {inactive + active}\nshmem 7\nactive_file {active}\ninactive_file {inactive}\n")
        if high is not None:
            self.write(f"{folder}/memory.high", f"{high}\n")

    def v1(self, group, limit=V1_UNLIMITED, used=0, inactive=0):
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_active_file 0\ntotal_inactive_file {inactive}\n")

    def limits(self, **environ):
        return read_limits(str(self.root), environ)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_with_no_control_group_there_is_no_limit_and_meminfo_is_a_hint(machine):
    limits = machine.limits()
    assert (limits.limit_bytes, limits.limit_source) == (None, "no control-group limit")
    assert (limits.total_bytes, limits.available_bytes, limits.slurm_bytes) == (128 * GIB, 100 * GIB, None)


def test_a_machine_without_proc_has_no_limit(tmp_path):
    assert read_limits(str(tmp_path), {}) == HostLimits(None, "no control-group limit", 0)


def test_unlimited_groups_set_no_limit(machine):
    machine.in_group("4:memory:/job\n0::/job")
    machine.v2("job", limit="max", used=3 * GIB, high="max")
    machine.v1("job", used=3 * GIB)
    assert machine.limits().limit_bytes is None


def test_a_v2_limit_counts_what_is_used_but_not_file_cache(machine):
    machine.in_group("0::/job")
    machine.v2("job", limit=64 * GIB, used=30 * GIB, inactive=8 * GIB, active=4 * GIB)
    limits = machine.limits()
    assert limits.limit_bytes == (64 - 30 + 12) * GIB
    assert limits.limit_source == str(machine.root / "sys/fs/cgroup/job/memory.max")


def test_a_v1_limit_counts_what_is_used_but_not_file_cache(machine):
    machine.in_group("9:name=systemd:/\n4:cpu,memory:/slurm/job_7/step_0")
    machine.v1("slurm/job_7/step_0", limit=64 * GIB, used=30 * GIB, inactive=8 * GIB)
    limits = machine.limits()
    assert limits.limit_bytes == (64 - 30 + 8) * GIB
    assert limits.limit_source == str(machine.root / "sys/fs/cgroup/memory/slurm/job_7/step_0/memory.limit_in_bytes")


@pytest.mark.parametrize("tightest", ["", "user.slice", "user.slice/session", "user.slice/session/app"])
def test_the_tightest_group_of_the_whole_chain_counts(machine, tightest):
    machine.in_group("0::/user.slice/session/app")
    for group in ("", "user.slice", "user.slice/session", "user.slice/session/app"):
        machine.v2(group, limit=20 * GIB if group == tightest else 50 * GIB, used=5 * GIB)
    machine.v2("user.slice/other", limit=1 * GIB)
    limits = machine.limits()
    assert limits.limit_bytes == 15 * GIB
    assert limits.limit_source == str(machine.root / "sys/fs/cgroup" / tightest / "memory.max")


def test_a_looser_limit_that_is_nearly_used_up_is_the_tightest(machine):
    machine.in_group("0::/slice/job")
    machine.v2("slice", limit=100 * GIB, used=97 * GIB)
    machine.v2("slice/job", limit=20 * GIB, used=2 * GIB)
    assert machine.limits().limit_bytes == 3 * GIB


def test_the_v1_chain_is_followed_too(machine):
    machine.in_group("4:memory:/slurm/job/step")
    machine.v1("slurm", limit=40 * GIB, used=10 * GIB)
    machine.v1("slurm/job")
    machine.v1("slurm/job/step", limit=60 * GIB)
    assert machine.limits().limit_bytes == 30 * GIB


def test_the_limit_above_which_a_group_is_slowed_down_counts(machine):
    machine.in_group("0::/job")
    machine.v2("job", limit=64 * GIB, high=32 * GIB, used=2 * GIB)
    limits = machine.limits()
    assert limits.limit_bytes == 30 * GIB and limits.limit_source.endswith("memory.high")


def test_an_overdrawn_group_leaves_nothing(machine):
    machine.in_group("0::/job")
    machine.v2("job", limit=4 * GIB, used=5 * GIB)
    assert machine.limits().limit_bytes == 0


def test_a_container_that_sees_the_hosts_path_finds_its_own_group_at_the_top_of_the_mount(machine):
    machine.in_group("4:memory:/docker/c0ffee", MOUNT_V1.format(top="/docker/c0ffee"))
    machine.v1("", limit=16 * GIB, used=1 * GIB)
    assert machine.limits().limit_bytes == 15 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_below_a_containers_own_is_found(machine, version):
    line, mount = ("4:memory:", MOUNT_V1) if version == 1 else ("0::", MOUNT_V2)
    write = machine.v1 if version == 1 else machine.v2
    machine.in_group(line + "/docker/c0ffee/worker", mount.format(top="/docker/c0ffee"))
    write("", limit=16 * GIB)
    write("worker", limit=4 * GIB)
    assert machine.limits().limit_bytes == 4 * GIB


def test_without_mounts_a_path_that_is_not_there_means_the_top(machine):
    machine.in_group("0::/kubepods/pod1/c0ffee")
    machine.v2("", limit=8 * GIB)
    assert machine.limits().limit_bytes == 8 * GIB


def test_a_mount_elsewhere_is_followed(machine):
    machine.in_group("0::/job", "31 23 0:28 / /cgroups/unified rw - cgroup2 cgroup2 rw")
    machine.write("cgroups/unified/job/memory.max", 6 * GIB)
    assert machine.limits().limit_bytes == 6 * GIB


def test_what_is_free_is_the_less_of_meminfo_and_control_group(machine):
    machine.in_group("0::/job")
    machine.v2("job")
    assert free_bytes(str(machine.root)) == 100 * GIB
    machine.v2("job", limit=64 * GIB, used=60 * GIB)
    assert free_bytes(str(machine.root)) == 4 * GIB
    machine.v2("job", limit=640 * GIB, used=60 * GIB)
    assert free_bytes(str(machine.root)) == 100 * GIB


@pytest.mark.parametrize(
    "environ, gib",
    [
        ({"SLURM_MEM_PER_NODE": "65536"}, 64),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "16"}, 32),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "2048"}, None),
        ({"SLURM_MEM_PER_NODE": "64G"}, None),
    ],
)
def test_slurms_grant_is_told_and_limits_nothing(machine, environ, gib):
    limits = machine.limits(**environ)
    assert limits.slurm_bytes == (None if gib is None else gib * GIB)
    assert budget_bytes(limits, 1).size_bytes is None


def limited(gib, **more):
    return HostLimits(int(gib * GIB), "/sys/fs/cgroup/memory.max", 500 * GIB, **more)


def test_local_ranks_share_a_limit_and_leave_a_reserve():
    one, eight = (budget_bytes(limited(80), ranks).size_bytes for ranks in (1, 8))
    assert one == 76 * GIB
    assert eight * 8 <= one and one - eight * 8 < 8


def test_without_a_limit_little_available_memory_forbids_nothing():
    budget = budget_bytes(HostLimits(None, "no control-group limit", 1 * GIB, 31 * GIB), 8)
    assert budget.size_bytes is None


def test_what_the_user_asks_for_is_taken_below_a_limit_only():
    assert budget_bytes(limited(80), 2, 10.5) == Budget(int(10.5 * GIB), "--memo-host-gib", 2)
    above = budget_bytes(limited(80), 2, 39)
    assert above.size_bytes == 38 * GIB
    assert above.source == "/sys/fs/cgroup/memory.max, below --memo-host-gib 39"
    assert budget_bytes(HostLimits(None, "no control-group limit", GIB), 2, 39).size_bytes == 39 * GIB


@pytest.mark.parametrize("text, ranks", [(None, 1), ("", 1), ("0", 1), ("4", 4)])
def test_local_ranks_come_from_the_launcher(monkeypatch, text, ranks):
    if text is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert host_memory.local_ranks() == ranks


def test_ranks_that_need_more_may_take_more():
    first, last = (budget_bytes(limited(80), 2, None, fraction).size_bytes for fraction in (0.75, 0.25))
    assert first == 3 * last and first + last == budget_bytes(limited(80), 1).size_bytes


def test_a_shortage_names_what_is_needed_what_is_there_its_source_and_the_alpha_that_fits():
    error = shortage_error(int(12.5 * GIB), budget_bytes(limited(80, slurm_bytes=96 * GIB), 8), 0.25)
    assert isinstance(error, HostMemoryError)
    for part in ("need 12.500 GiB", "one of 8 on its node", "there are 9.500 GiB", "/sys/fs/cgroup/memory.max", "Slurm granted 96.000 GiB", "--memo-alpha 0.25 fits"):
        assert part in str(error)


def test_a_shortage_that_no_alpha_mends_says_so():
    text = str(shortage_error(9 * GIB, Budget(GIB, "--memo-host-gib", 1), None))
    assert "No --memo-alpha fits" in text and "--memo-keep-layers" in text and "(--memo-host-gib)" in text


def test_a_shortage_without_a_known_size_claims_no_number():
    assert "there are an unknown amount" in str(shortage_error(GIB, Budget(None, "no control-group limit", 1), 0.5))
