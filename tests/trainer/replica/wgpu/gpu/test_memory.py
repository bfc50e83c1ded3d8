"""The pool: what it hands out again, what it counts, and what a machine has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest

from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import (
    MemoryBudget,
    MemoryPool,
    check_fits,
    measure_available_memory,
)
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter, Kind
from trainer.system import pci
from trainer.system.errors import InputError


def test_memory_given_back_is_taken_again_the_smallest_that_fits(device: Device) -> None:
    pool = MemoryPool(device)
    small, large = pool.take((128,)), pool.take((1024,))
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take((100,)).buffer is small.buffer
    assert pool.take((65,)).buffer is large.buffer
    third = pool.take((1,))
    assert third.buffer not in (small.buffer, large.buffer)
    assert pool.report_budget() == MemoryBudget({"workspace": 512 + 4096 + 256})


def test_purposes_do_not_share() -> None:
    pool = MemoryPool(None)
    pool.give_back(pool.take((256,), purpose="activations"))
    pool.take((1,), purpose="checkpoints")
    pool.take((256,), purpose="activations")
    assert pool.report_budget().parts == {"activations": 1024, "checkpoints": 256}


def test_a_plan_counts_what_a_device_allocates(device: Device) -> None:
    def record(pool: MemoryPool) -> None:
        kept = [pool.take((3, 50 + 7 * n), purpose="checkpoints") for n in range(5)]
        for n in range(20):
            one, two = pool.take((n + 1, 33)), pool.take((40 - n, 17), "u32")
            pool.give_back(one)
            frozen = pool.take((9, 100), "nf4", purpose="frozen")
            pool.give_back(two)
            if n % 3:
                pool.give_back(frozen)
        for array in kept:
            pool.give_back(array)

    planned, real = MemoryPool(None), MemoryPool(device)
    before = device.allocated
    record(planned)
    record(real)
    assert real.report_budget() == planned.report_budget()
    assert device.allocated - before == planned.report_budget().total
    real.release()
    assert device.allocated == before
    assert real.report_budget().total == 0


def test_an_nf4_array_gives_its_scales_back_too() -> None:
    pool = MemoryPool(None)
    for _ in range(3):
        array = pool.take((64, 64), "nf4")
        assert array.scales is not None
        assert array.scales.shape == (64,)
        pool.give_back(array)
    assert pool.report_budget().total == 64 * 64 // 2 + 64 * 4


def test_what_was_not_taken_cannot_be_given() -> None:
    pool = MemoryPool(None)
    array = pool.take((4, 64))
    with pytest.raises(AssertionError, match="was not taken here"):
        pool.give_back(array.reshape(256))
    pool.give_back(array)
    with pytest.raises(AssertionError, match="given already"):
        pool.give_back(array)


def test_a_budget_above_the_memory_is_refused_in_one_line() -> None:
    budget = MemoryBudget({"frozen": 6 << 30, "activations": 2 << 30})
    check_fits(budget, 9 << 30, "Radeon", "less")
    with pytest.raises(InputError) as refused:
        check_fits(budget, 8 << 30, "Radeon", "less")
    message = str(refused.value)
    assert "\n" not in message
    assert "Radeon: the run needs 8.0 GiB (frozen 6.0, activations 2.0), 8.0 are free" in message
    assert message.endswith("; use less")


def adapter(kind: Kind, address: str = "") -> Adapter:
    return Adapter(0, "card", "driver", kind, address=address)


def test_a_radeon_tells_its_free_memory_in_files(tmp_path: Path) -> None:
    folder = tmp_path / "0000:0b:00.0"
    folder.mkdir()
    (folder / "mem_info_vram_total").write_text("8573157376\n")
    (folder / "mem_info_vram_used").write_text("73157376\n")
    assert measure_available_memory(adapter("discrete", "0000:0b:00.0"), tmp_path) == 8_500_000_000


def test_the_largest_of_the_cards_that_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert pci.largest_free_memory(tmp_path) is None
    classes = {"0000:03:00.0": "0x030000", "0000:0b:00.0": "0x038000", "0000:0c:00.0": "0x010802"}
    for number, (address, kind) in enumerate(classes.items(), 1):
        (tmp_path / address).mkdir()
        (tmp_path / address / "class").write_text(f"{kind}\n")
        (tmp_path / address / "mem_info_vram_total").write_text(f"{number}000\n")
        (tmp_path / address / "mem_info_vram_used").write_text("0\n")
    assert pci.largest_free_memory(tmp_path) == 2000  # the third is a disk


def test_nvidia_tells_through_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho '00000000:01:00.0, 100'\necho '00000000:0B:00.0, 23028'\n", "utf-8"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert measure_available_memory(adapter("discrete", "0000:0b:00.0"), tmp_path) == 23028 << 20
    tool.write_text("#!/bin/sh\necho failed; exit 9\n")
    assert measure_available_memory(adapter("discrete", "0000:0b:00.0"), tmp_path) is None


def test_who_does_not_tell_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    with pytest.raises(FileNotFoundError):
        subprocess.run(["nvidia-smi"], check=False)
    assert measure_available_memory(adapter("discrete", "0000:0b:00.0"), tmp_path) is None
    assert measure_available_memory(adapter("discrete"), tmp_path) is None
    assert measure_available_memory(adapter("other"), tmp_path) is None


@pytest.mark.parametrize("kind", ["integrated", "software"])
def test_an_adapter_without_memory_of_its_own_has_the_machines(kind: Kind) -> None:
    there = measure_available_memory(adapter(kind))
    assert there is not None
    assert 0 < there <= psutil.virtual_memory().total


def test_a_pool_on_a_device_holds_what_is_written(device: Device) -> None:
    pool = MemoryPool(device)
    array = pool.take((5, 13))
    values = np.arange(65, dtype=np.float32).reshape(5, 13)
    device.write(array, values)
    np.testing.assert_array_equal(device.read(array), values)
