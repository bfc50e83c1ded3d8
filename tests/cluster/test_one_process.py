"""The benchmarks' runs in one process have the bits of a run of processes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rig.one_process import OneProcess
from tests.cluster.real_cluster import BATCH, Cluster
from tests.covering import covering
from trainer.config.run import load
from trainer.replica.torch.replica import TorchReplica
from trainer.run.inputs import read_inputs

pytestmark = pytest.mark.cluster

TRAINED: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "adapters": {"method": "lora"},
    "A frozen": {"method": "lora", "lora__freeze_a": True},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "steps": {},
    "rounds": {
        "exchange__schedule": "rounds",
        "exchange__inner_steps": 4,
        "training__batch_size": BATCH // 4,
        "training__epochs": 2,
    },
}
CASES = [
    ("full", "fp32", "steps"),
    ("full", "int8", "steps"),
    ("adapters", "int4", "steps"),
    ("A frozen", "fp32", "steps"),
    ("A frozen", "fp32", "rounds"),
    ("full", "fp32", "rounds"),
]


@pytest.mark.parametrize(("trained", "codec", "schedule"), covering(CASES))
def test_one_process_computes_the_bits_of_three(
    cluster: Cluster, trained: str, codec: str, schedule: str
) -> None:
    cluster.configure(exchange__codec=codec, **TRAINED[trained], **SCHEDULES[schedule])
    processes = [cluster.coordinator(2), *(cluster.torch_worker(rank) for rank in range(2))]
    inputs = read_inputs(load(cluster.run_file, {}), "run")
    replica = TorchReplica(inputs.model_dir, inputs.config, inputs.layout, threads=1)
    losses: list[float | None] = []
    run = OneProcess(inputs, replica, 2, lambda step: losses.append(step.loss))
    digest = run.run()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert losses == [step["loss"] for step in cluster.records("step")]
    assert digest == cluster.events("verified")[-1]["digest"]
    sizes = [step["exchange_bytes"] for step in cluster.records("step")]
    assert run.sent.total() == sum(sizes)
