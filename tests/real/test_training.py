"""SmolLM2-135M learns what a loop of transformers and PEFT learns, in one process and three."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.runs.certificates.authority import Authority
from tests.cluster.real_cluster import Bench, Cluster
from tests.real.data import Described, write_lines
from tests.real.peft_loop import PeftLoop, encode
from trainer.config.run import RunConfig, load_config

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

STEPS, ROWS, LENGTH = 3, 4, 64
CASES: dict[str, dict[str, Any]] = {
    "lora": {"task": "causal-lm"},
    "qlora": {"task": "causal-lm", "model__quantization": "nf4"},
    "full": {"task": "causal-lm", "method": "full", "optimizer__learning_rate": 1e-5},
    "classifier": {"task": "classify", "num_classes": 2},
}


@dataclass(frozen=True)
class Trained:
    """What a loop makes of a model."""

    losses: list[float]
    after: float
    """The mean loss after the last step."""


@pytest.fixture(scope="module")
def rows(
    sections: list[Described], subjects: list[dict[str, object]]
) -> dict[str, list[dict[str, Any]]]:
    """Return four rows of each task; all of them are one step's batch."""
    short = [row for row in sections if len(row.text) < 60][:ROWS]
    mails = [row for row in subjects if len(str(row["input"])) < 60][:ROWS]
    return {"causal-lm": [row.conversation for row in short], "classify": mails}


@pytest.fixture(scope="module")
def started(
    smollm2: Path, first_layers: Path, rows: dict[str, Any], tmp_path_factory: Any
) -> Iterator[Callable[..., Cluster]]:
    """Return a maker of runs; whatever is left of them at the end is killed."""
    made: list[Cluster] = []
    folder = tmp_path_factory.mktemp("runs")

    def make(case: str, **settings: Any) -> Cluster:
        asked = CASES[case]
        data = write_lines(folder / f"{asked['task']}.jsonl", rows[asked["task"]])
        model = first_layers if case == "full" else smollm2
        bench = Bench(model, data, data, folder, Authority.create())
        run = Cluster(bench, folder, f"{case}-{len(made)}")
        made.append(run)
        run.configure(
            **{
                "num_classes": None,
                "method": "lora",
                "data__max_seq_len": LENGTH,
                "data__validation_fraction": 0.0,
                "optimizer__learning_rate": 1e-4,
                "optimizer__max_grad_norm": 1.0,
                "training__batch_size": ROWS,
                "training__max_steps": STEPS,
                "checkpoint__every": 1000,
            }
            | asked
            | settings
        )
        return run

    yield make
    for run in made:
        run.end()
        print(run.logs())


@pytest.fixture(scope="module")
def reference(
    smollm2: Path, first_layers: Path, rows: dict[str, Any], started: Callable[..., Cluster]
) -> Callable[[str], Trained]:
    """Return what the loop makes of a case, computed once."""
    found: dict[str, Trained] = {}

    def train(case: str) -> Trained:
        if case not in found:
            torch.set_num_threads(1)
            config: RunConfig = load_config(started(case).run_file, {})
            folder = first_layers if case == "full" else smollm2
            batch = encode(folder, rows[config.task], LENGTH)
            loop = PeftLoop(folder, config)
            losses = loop.losses(batch, STEPS)
            with torch.no_grad():
                after = loop.mean_loss(batch)
            found.clear()  # one model at a time
            found[case] = Trained(losses, after)
        return found[case]

    return train


def train(run: Cluster, processes: int) -> None:
    """Run to the end, in one process or as a coordinator and two workers."""
    if processes == 1:
        ends = [run.trainer("local", "--threads", "1", "--gpu-backend", "cpu")]
    else:
        ends = [run.coordinator(processes - 1)]
        ends += [run.torch_worker(rank, "--gpu-backend", "cpu") for rank in range(processes - 1)]
    assert [process.wait(600) for process in ends] == [0] * len(ends), run.logs()


def losses(run: Cluster) -> list[float]:
    return [step["loss"] for step in run.records("step")]


@pytest.mark.parametrize(
    ("case", "processes"),
    [("lora", 1), ("lora", 3), ("qlora", 1), ("full", 3), ("classifier", 1), ("classifier", 3)],
)
def test_losses_are_those_of_a_peft_loop(
    started: Callable[..., Cluster],
    reference: Callable[[str], Trained],
    smollm2: Path,
    rows: dict[str, Any],
    case: str,
    processes: int,
) -> None:
    run = started(case)
    train(run, processes)
    expected = reference(case)
    assert losses(run) == pytest.approx(expected.losses, rel=2e-5)
    assert expected.after < expected.losses[0]
    if case == "lora":
        check_adapter_in_peft(run, smollm2, rows["causal-lm"], expected.after)


def check_adapter_in_peft(
    run: Cluster, base: Path, rows: list[dict[str, Any]], expected: float
) -> None:
    """PEFT opens the saved adapter, and the model then has the loop's loss."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, str(run.checkpoint)).eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for row in encode(base, rows, LENGTH):
            out = model(input_ids=row.ids, labels=row.labels)
            count = int((row.labels[:, 1:] != -100).sum())
            total, targets = total + out.loss.item() * count, targets + count
    assert total / targets == pytest.approx(expected, rel=1e-3)


def test_a_worker_that_is_killed_comes_back(started: Callable[..., Cluster]) -> None:
    """A step whose worker died is computed by the other; each row counts once."""
    run = started("lora", training__max_steps=40, checkpoint__every=1000)
    coordinator = run.coordinator(2)
    run.torch_worker(0, "--gpu-backend", "cpu")
    killed = run.torch_worker(1, "--gpu-backend", "cpu")
    run.wait_step(2)
    killed.kill()
    run.wait_event("lost", rank=1)
    run.torch_worker(1, "--gpu-backend", "cpu")
    run.wait_event("rejoined", rank=1)
    run.wait_step(run.step + 2)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait(120) == 0, run.logs()
    for step in run.records("step"):
        taken = [at for _, start, stop in step["sample_ranges"] for at in range(start, stop)]
        assert sorted(taken) == list(range(ROWS)), step
    assert run.events("verified")[-1]["ranks"] == [0, 1]
    assert not run.events("diverged")
