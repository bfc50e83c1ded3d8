"""F-DP-004 in the middle of a run: a worker whose GPU is lost goes on with what is left.

The loss is real: the device is destroyed under the worker's engine. Its coordinator starts it
again, as it does with any worker that dies, and the worker looks anew for a backend that works.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests import ROOT
from tests.cluster.real_cluster import Cluster
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("vulkan"),
    pytest.mark.timeout(900),  # it waits twice for a worker that compiles its kernels
]

FAULT = Path(__file__).parent / "lost_gpu"
"""Holds the code that Python runs in every process of the coordinator, before its own."""
DRIVERS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))


def copied_drivers(folder: Path) -> list[Path]:
    """Return copies of the manifests that Vulkan finds drivers by, so that they can be removed."""
    folder.mkdir()
    found = [manifest for place in DRIVERS for manifest in place.glob("*.json")]
    return [Path(shutil.copy(manifest, folder)) for manifest in found]


@pytest.mark.long
@pytest.mark.parametrize("driver", ["stays", "goes"])
def test_a_lost_gpu_in_a_run(cluster: Cluster, tmp_path: Path, driver: str) -> None:
    manifests, fault = copied_drivers(tmp_path / "drivers"), tmp_path / "fault"
    cluster.configure(training__epochs=500, exchange__join_deadline=250.0)
    coordinator = cluster.trainer(
        "coordinator",
        *("--role", "coordinator", "--bind", cluster.address, "--expect-workers", "2"),
        *("--gpus", "0", "--gpu-backend", "wgpu", "--threads", "1"),
        VK_DRIVER_FILES=":".join(map(str, manifests)),
        PYTHONPATH=f"{FAULT}:{ROOT}",
        LOST_GPU_FAULT=str(fault),
    )
    cluster.torch_worker(1, "--gpu-backend", "cpu")
    wait_for(lambda: cluster.step >= 3, "both joined", cluster, 250)
    assert cluster.events("joined", rank=0)[0]["backend"] == "wgpu"

    if driver == "goes":
        shutil.rmtree(tmp_path / "drivers")
    fault.touch()
    cluster.wait_event("lost", rank=0)
    coordinator.says("restarting it")
    meanwhile = cluster.step
    back = wait_for(lambda: cluster.events("rejoined", rank=0), "it is back", cluster, 250)[0]
    assert back["step"] > meanwhile  # F-DP-006: nobody waited for it
    cluster.wait_step(back["step"] + 5)
    assert cluster.records("step")[-1]["worker_samples"].keys() == {"0", "1"}

    assert any(
        f"worker 0 exited with code {code}, restarting it" in coordinator.text
        for code in (7, -signal.SIGABRT)  # we saw it first, or the driver's library did
    )
    status = cluster.status["workers"][0]
    assert (status["backend"], status["backend_reason"]) == (
        back["backend"],
        back["backend_reason"],
    )
    if driver == "goes":
        assert back["backend"] == "cpu"
        assert back["backend_reason"] == "wgpu: no Vulkan device answers"
        assert "falling back to cpu (wgpu: no Vulkan device answers)" in coordinator.text
    else:
        assert (back["backend"], back["backend_reason"]) == ("wgpu", "")

    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    cluster.check_contracts_so_far([0, 1])
