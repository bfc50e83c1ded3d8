"""Limits of control groups: trees as kernels, container engines and Slurm make them; a real one.

As root it makes a group in the version that the machine has. Debian's user-mode-linux has both:
`linux.uml mem=2500M rootfstype=hostfs rootflags=/ rw init=FIRST con0=null,fd:1 con1=null con=null`,
where FIRST is a script of root's that mounts /proc, /sys and cgroup2 at /sys/fs/cgroup, writes
`+memory +cpu` to cgroup.subtree_control there, runs this file with pytest, and calls `poweroff -f`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from trainer.system.cgroups import count_processors, free_memory, memory_limit

GIB = 1 << 30
V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "{n} 31 0:29 {mounted} /sys/fs/cgroup/{name} rw,nosuid - cgroup cgroup rw,{name}"
UNLIMITED = "9223372036854771712"


def tree(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> Path:
    """Write what a kernel shows of its groups below a folder that stands for `/`."""
    proc = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, text in (
        proc | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    ).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def v1(name: str, mounted: str = "/") -> str:
    return V1.format(n=32, name=name, mounted=mounted)


STEP = "job_7/step_0"
CASES = {
    "a container sees its group as the root": (
        *("0::/", V2),
        {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}", "cpu.max": "150000 100000"},
        *(4 * GIB, 3 * GIB, 2),
    ),
    "a group's files of inactive cache are free": (
        *("0::/", V2),
        {
            "memory.max": f"{4 * GIB}",
            "memory.current": f"{3 * GIB}",
            "memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 9",
        },
        *(4 * GIB, 3 * GIB, 8),
    ),
    "an ancestor's limit counts: Slurm limits the job, not the step": (
        *(f"0::/{STEP}", V2),
        {
            f"{STEP}/memory.max": "max",
            f"{STEP}/memory.current": f"{GIB}",
            f"{STEP}/cpu.max": "max 100000",
            "job_7/memory.max": f"{6 * GIB}",
            "job_7/memory.current": f"{5 * GIB}",
            "job_7/cpu.max": "300000 100000",
        },
        *(6 * GIB, GIB, 3),
    ),
    "the tightest of several levels counts": (
        *(f"0::/{STEP}", V2),
        {
            f"{STEP}/memory.max": f"{5 * GIB}",
            f"{STEP}/memory.current": "0",
            f"{STEP}/cpu.max": "400000 100000",
            "job_7/memory.max": f"{6 * GIB}",
            "job_7/memory.current": f"{4 * GIB}",
            "job_7/cpu.max": "200000 100000",
        },
        *(5 * GIB, 2 * GIB, 2),
    ),
    "memory.high slows a process down long before memory.max ends it": (
        *("0::/", V2),
        {"memory.max": f"{8 * GIB}", "memory.high": f"{3 * GIB}", "memory.current": "0"},
        *(3 * GIB, 3 * GIB, 8),
    ),
    "a tenth of a processor is one": (
        "0::/",
        V2,
        {"cpu.max": "10000 100000"},
        16 * GIB,
        10 * GIB,
        1,
    ),
    "version 2 without a limit": (
        *("0::/user.slice", V2),
        {"user.slice/memory.max": "max", "user.slice/cpu.max": "max 100000"},
        *(16 * GIB, 10 * GIB, 8),
    ),
    "version 1: the container's path from outside, its folder mounted as the root": (
        "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/",
        "\n".join([v1("memory", "/docker/ab"), v1("cpu", "/docker/ab")]),
        {
            "memory/memory.limit_in_bytes": f"{2 * GIB}",
            "memory/memory.usage_in_bytes": f"{GIB}",
            "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
            "cpu/cpu.cfs_quota_us": "250000",
            "cpu/cpu.cfs_period_us": "100000",
        },
        *(2 * GIB, GIB + GIB // 2, 3),
    ),
    "version 1 without a limit": (
        f"4:memory:/{STEP}\n3:cpu:/{STEP}",
        "\n".join([v1("memory"), v1("cpu")]),
        {
            f"memory/{STEP}/memory.limit_in_bytes": UNLIMITED,
            f"memory/{STEP}/memory.usage_in_bytes": f"{GIB}",
            f"cpu/{STEP}/cpu.cfs_quota_us": "-1",
            f"cpu/{STEP}/cpu.cfs_period_us": "100000",
        },
        *(16 * GIB, 10 * GIB, 8),
    ),
    "version 1 limits memory, version 2 holds the processes (hybrid)": (
        f"4:memory:/{STEP}\n0::/elsewhere",
        "\n".join([v1("memory"), "38 31 0:35 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"]),
        {
            "memory/job_7/memory.limit_in_bytes": f"{3 * GIB}",
            "memory/job_7/memory.usage_in_bytes": f"{GIB}",
            f"memory/{STEP}/memory.limit_in_bytes": UNLIMITED,
        },
        *(3 * GIB, 2 * GIB, 8),
    ),
    "a group outside of what the container sees": (
        *("0::/../../outside", V2),
        {"memory.max": f"{GIB}", "memory.current": "0"},
        *(GIB, GIB, 8),
    ),
    "a mount point with a space": (
        *("0::/", V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040groups")),
        {"my groups/memory.max": f"{GIB}", "my groups/memory.current": "0"},
        *(GIB, GIB, 8),
    ),
    "used beyond a limit that was lowered": (
        *("0::/", V2),
        {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"},
        *(GIB, 0, 8),
    ),
    "no groups at all": ("", "", {}, 16 * GIB, 10 * GIB, 8),
}


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limit", "free", "cores"), CASES.values(), ids=CASES
)
def test_limits_of_a_tree(
    tmp_path: Path,
    groups: str,
    mounts: str,
    files: dict[str, str],
    limit: int,
    free: int,
    cores: int,
) -> None:
    root = tree(tmp_path, groups, mounts, files)
    assert memory_limit(16 * GIB, root) == limit
    assert free_memory(10 * GIB, root) == free
    assert count_processors(8, root) == cores


def test_a_machine_may_have_less_than_its_limit(tmp_path: Path) -> None:
    files = {"memory.max": f"{64 * GIB}", "memory.current": "0", "cpu.max": "6400000 100000"}
    root = tree(tmp_path, "0::/", V2, files)
    assert memory_limit(16 * GIB, root) == 16 * GIB
    assert free_memory(10 * GIB, root) == 10 * GIB
    assert count_processors(8, root) == 8


@pytest.fixture
def own_groups() -> Iterator[list[Path]]:
    """Return groups that only this test's processes join, limited to 512 MiB and 1.5 processors."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make control groups")
    name, made = f"motley-test-{os.getpid()}", list[Path]()
    version_1 = {
        "memory": ("memory.limit_in_bytes", "536870912"),
        "cpu": ("cpu.cfs_quota_us", "150000"),
    }
    version_2 = {"memory.max": "536870912", "cpu.max": "150000 100000"}
    top = Path("/sys/fs/cgroup")
    try:
        if (top / "cgroup.controllers").exists():
            if not {"memory", "cpu"} <= set((top / "cgroup.subtree_control").read_text().split()):
                pytest.skip("needs root to make control groups")
            limits = [(top / name, file, text) for file, text in version_2.items()]
        else:
            limits = [(top / kind / name, *version_1[kind]) for kind in version_1]
        for folder, file, text in limits:
            try:
                folder.mkdir(exist_ok=True)
                made.append(folder)
                (folder / file).write_text(text)
            except OSError:
                pytest.skip("needs root to make control groups")
        yield sorted(set(made))
    finally:
        for folder in sorted(set(made)):
            folder.rmdir()


def test_a_process_in_a_group_of_its_own_sees_its_limits(own_groups: list[Path]) -> None:
    """What the launcher and a replica ask for: cores, free memory, all memory."""
    program = f"""
import os
for folder in {[str(folder) for folder in own_groups]}:
    with open(folder + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from launcher.inventory.facts.devices import available_memory, main_memory, usable_cores
from trainer.planning.defaults import own_rooms
from trainer.replica.torch.processors import count_usable_processors
held = bytearray(100 << 20)
room = own_rooms("cpu")[0].memory
print(usable_cores(), count_usable_processors(), main_memory(), available_memory(), room)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    cores, processors_, limit, free, room = map(int, done)
    assert cores == processors_ == min(2, len(os.sched_getaffinity(0)))
    assert limit == 512 << 20
    assert 300 << 20 < free < 412 << 20
    assert 300 << 20 < room < 412 << 20


def test_data_that_does_not_fit_is_refused_before_the_kernel_ends_the_process(
    own_groups: list[Path], tmp_path: Path
) -> None:
    """The same file is read first, and then with little memory left."""
    data = tmp_path / "d.jsonl"
    data.write_text(f'{{"text": "{"x" * (1 << 20)}"}}\n' * 20)
    program = f"""
import os
for folder in {[str(folder) for folder in own_groups]}:
    with open(folder + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from pathlib import Path
from trainer.data.samples import read_file
from trainer.system.errors import InputError
print(len(read_file(Path({str(data)!r}), "causal-lm").samples))
held = bytearray(440 << 20)
try:
    read_file(Path({str(data)!r}), "causal-lm")
except InputError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert done[0] == "20"
    assert done[1].startswith(f"{data}: does not fit into memory: 16 samples are read, and ")
