"""A run is exported as a folder: what is in it, and one line for every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from launcher.cli import run
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.records.registry import Registry
from launcher.runs.records.stored_configs import StartArguments, store_config
from launcher.runs.up import deliver_run
from tests.launcher.handmade import make_wheel
from tests.trainer.replica.torch.parallel.models import write_drawn_model
from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.config.run import RunConfig, load_config
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.optimizer.adamw import TrainState

pytestmark = pytest.mark.usefixtures("own_state")
TARGET = ("--target", "2 nodes x 2 CPU")
Export = Callable[..., Path]


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[str, ...]:
    """Return the flags of a new run on a tiny model."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "to be"}\n')
    locks = {name: f"# {name}\n{name}==1\n" for name in ("trainer", "torch-cpu", "torch-cuda")}
    files = {f"launcher/locks/{name}.txt": text for name, text in locks.items()}
    wheel = make_wheel(tmp_path, "motley", "9.9", files)
    model = write_drawn_model(tmp_path / "model", "qwen3")
    described = ("--model", str(model), "--data", str(data), "-o", str(tmp_path / "home"))
    return (*described, "--wheel", str(wheel), "--set", "training.max_steps=8")


@pytest.fixture
def export(inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Return a function that exports a new run into a folder and returns that folder."""

    def make(name: str = "away", *more: str) -> Path:
        folder = tmp_path / name
        command = ["export", "--to", "slurm", *TARGET, *inputs, "--into", str(folder), *more]
        assert run(command) == 0, capsys.readouterr().err
        capsys.readouterr()
        return folder

    return make


def register(config: RunConfig, run_id: str) -> None:
    """List a run on this machine as one that was started here and has ended."""
    here = Host(name="localhost", connection="local")
    leader = ProcessPlan(
        name="coordinator",
        role="coordinator",
        host=here.name,
        device="",
        backend="",
        threads=None,
        argv=(),
        env={},
        folder="",
    )
    plan = LaunchPlan(run_id=run_id, output=config.output, hosts=(here,), processes=(leader,))
    started, record = Registry.for_this_user().record_run(plan)
    text = config.to_yaml().encode()
    store_config(run_id, text, StartArguments())
    deliver_run(started, record, text)


def write_output(
    output: Path, config: RunConfig, run_id: str, *steps: int, state: str = "stopped"
) -> None:
    layout = build_layout(Path(config.model.path), config)
    store = CheckpointStore(output / "checkpoints", layout, config, Path(config.model.path))
    for step in steps:
        weights = np.full(layout.size, step, dtype=np.float32)
        zeros = np.zeros_like(weights)
        state_then = TrainState(weights, zeros, zeros.copy(), step=step)
        tree = config.model_dump(mode="json")
        store.save(state_then.take_snapshot(), RunProgress(run_id, step, 0, 8, 0, 0, tree))
    status = {"run_id": run_id, "state": state, "step": steps[-1], "total_steps": 8}
    (output / "status.json").write_text(json.dumps(status))
    lines = ({"kind": "step", "step": step, "loss": 1.0} for step in range(1, steps[-1] + 1))
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def refused(command: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of a refused command."""
    capsys.readouterr()
    assert run(command) == code
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_has_all_that_a_run_needs_under_names_of_its_own(
    export: Export, tmp_path: Path
) -> None:
    folder = export("it's $(touch away); here")
    config = load_config(folder / "run.yaml")
    assert (config.model.path, config.data.train) == ("inputs/model", "inputs/train.jsonl")
    assert (config.output, config.checkpoint.folder) == ("output", None)
    assert config.training.max_steps == 8
    assert (folder / "inputs/model/config.json").is_file()
    assert (folder / "inputs/train.jsonl").read_text() == '{"text": "to be"}\n'
    for name, lock in (("requirements", "trainer"), ("requirements-torch", "torch-cpu")):
        assert (folder / f"{name}.txt").read_text() == f"{lock}==1\n"
        assert f"-r {name}.txt" in (folder / "setup.sh").read_text()
    assert (folder / "motley-9.9-py3-none-any.whl").is_file()
    assert "motley-9.9-py3-none-any.whl" in (folder / "setup.sh").read_text()
    for script in ("setup.sh", "job.sbatch"):
        assert "touch" not in (folder / script).read_text()
    left = {path.name for path in tmp_path.iterdir()}
    assert not [name for name in left if name.startswith(".")], left


def test_a_budget_goes_along_with_prices_of_the_target_alone(
    export: Export, inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger of this machine stays here, and a ceiling without a price is not exported."""
    host = {"name": "rack", "price_hour": 3.0}
    budget = {
        "ceiling": 5.0,
        "currency": "EUR",
        "hosts": [host],
        "ledger": "/home/user/spend.jsonl",
    }
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"task": "causal-lm", "budget": budget}))
    found = load_config(export("priced", "--config", str(own)) / "run.yaml").budget
    assert found is not None
    assert (found.ceiling, found.ledger) == (5.0, None)
    assert [(one.name, one.price_hour) for one in found.hosts] == [("rack", 3.0)]
    own.write_text(yaml.safe_dump({"task": "causal-lm", "budget": {**budget, "hosts": []}}))
    command = ["export", "--to", "slurm", *TARGET, *inputs, "--config", str(own)]
    assert "no host has a price" in refused([*command, "--into", str(tmp_path / "x")], 2, capsys)
    assert not (tmp_path / "x").exists()


@pytest.fixture
def own(export: Export, tmp_path: Path) -> RunConfig:
    """Return the config of the run `own`, which was started here and stopped at step 4."""
    settings = load_config(export("first") / "run.yaml").model_dump(mode="json")
    settings["model"]["path"] = str(tmp_path / "model")
    settings["data"]["train"] = str(tmp_path / "train.jsonl")
    settings["budget"] = {"ceiling": 5.0, "currency": "EUR"}
    settings["budget"]["hosts"] = [{"name": "rack", "price_hour": 3.0}]
    config = RunConfig.model_validate({**settings, "output": str(tmp_path / "home")})
    write_output(Path(config.output), config, "own", 2, 4)
    register(config, "own")
    return config


def export_own(inputs: tuple[str, ...], folder: Path) -> list[str]:
    wheel = inputs[inputs.index("--wheel") : inputs.index("--wheel") + 2]
    return ["export", "--to", "torchrun", *TARGET, "--run", "own", *wheel, "--into", str(folder)]


def test_a_run_of_this_machine_goes_along_with_its_newest_checkpoint(
    own: RunConfig, inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, away = Path(own.output), tmp_path / "away"
    (home / "spend.jsonl").write_text("what it has cost stays here\n")
    assert run(export_own(inputs, away)) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "from step 4" in said
    assert "budget.ceiling: counts what the run costs there, not what it has cost here" in said
    checkpoints = away / "output/checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-000004"]
    assert (checkpoints / "latest").readlink() == Path("step-000004")
    assert len((away / "output/metrics.jsonl").read_text().splitlines()) == 4
    names = {path.name for path in away.rglob("*")}
    assert names.isdisjoint({"export.json", "spend.jsonl"})


def test_a_damaged_checkpoint_is_not_exported(
    own: RunConfig, inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Path(own.output) / "checkpoints/step-000004/adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    line = refused(export_own(inputs, tmp_path / "away"), 2, capsys)
    assert f"{weights}: it does not match the manifest" in line
    assert not (tmp_path / "away").exists()


def test_data_keeps_its_suffix_and_may_be_a_folder(
    inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("to be\n")
    table = tmp_path / "v.1.csv"
    table.write_text("text\nto be\n")
    more = ("--data", str(folder), "--set", f"data.validation={table}")
    command = ["export", "--to", "slurm", *TARGET, *inputs, *more, "--into", str(tmp_path / "away")]
    assert run(command) == 0, capsys.readouterr().err
    assert (tmp_path / "away/inputs/train/a.txt").read_text() == "to be\n"
    assert (tmp_path / "away/inputs/validation.csv").is_file()


def test_a_gguf_file_goes_as_the_folder_that_it_stands_for(
    inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="the launcher-only install has none")
    from tests.trainer.gguf_files import write_gguf

    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    model = write_model(tmp_path / "m", write_data(tmp_path / "lines.jsonl"))
    file = write_gguf(tmp_path / "m.gguf", model)
    command = ["export", "--to", "slurm", *TARGET, *inputs, "--model", str(file)]
    assert run([*command, "--into", str(tmp_path / "away")]) == 0
    config = load_config(tmp_path / "away/run.yaml")
    assert config.model.path == "inputs/model"
    assert read_headers(tmp_path / "away/inputs/model").keys() == read_headers(model).keys()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--to", "nomad"), "'nomad' is not one of 'torchrun', 'slurm'"),
        (("--target", ""), "--target: cannot read ''"),
        (("--target", "2 racks"), "cannot read '2 racks'; write it as '2 nodes x 8 H100'"),
        (("--target", "0 nodes x 8 H100"), "cannot read '0 nodes x 8 H100'"),
        (("--target", "2 nodes x 8 H10"), "unknown device H10; near it:"),
        (("--target", "2 nodes x 8 MI300X"), "on CUDA or on processors, not on MI300X"),
        (("--set", "parallel.pipeline.stages=3"), "does not divide the world of 4 processes"),
        (("--set", "parallel.tensor=4"), "does not divide its 2 key-value heads"),
        (("--set", "name='$(reboot)'"), "name"),
        (("--run", "$(reboot)"), "no run $(reboot)"),
        (("--model", "/nowhere"), "/nowhere is not a model folder"),
        (("--data", "/nowhere.jsonl"), "/nowhere.jsonl is not a file or folder"),
        (("--into", "missing/away"), "is not a folder; create it first"),
        (("--into", "."), "exists already; name another folder"),
        (("--wheel", "/nowhere.whl"), "/nowhere.whl: No such file"),
    ],
)
def test_bad_input_is_one_line_and_no_folder(
    flags: tuple[str, ...],
    says: str,
    inputs: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = ["export", "--to", "slurm", *TARGET, *inputs, "--into", "away", *flags]
    assert says in refused(command, 2, capsys)
    assert list(folder.iterdir()) == []


def test_data_of_the_hub_is_downloaded_by_the_run_itself(
    inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = "hf://datasets/owner/name"
    more = ("--data", hub, "--set", f"data.validation={hub}/test.jsonl", "--set", "task=causal-lm")
    command = ["export", "--to", "slurm", *TARGET, *inputs, *more, "--into", str(tmp_path / "away")]
    assert run(command) == 0, capsys.readouterr().err
    config = load_config(tmp_path / "away/run.yaml")
    assert (config.data.train, config.data.validation) == (hub, f"{hub}/test.jsonl")
    assert [path.name for path in (tmp_path / "away/inputs").iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["x y.whl", "x\nRUN evil.whl", "$(reboot).whl", "-r.whl"])
def test_a_wheel_whose_name_is_a_command_is_not_exported(
    name: str, inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name stands in the Containerfile."""
    odd = Path(inputs[inputs.index("--wheel") + 1]).rename(tmp_path / name)
    command = ["export", "--to", "kubernetes", *TARGET, *inputs, "--wheel", str(odd)]
    assert "not the file name" in refused([*command, "--into", str(tmp_path / "x")], 2, capsys)
    assert not (tmp_path / "x").exists()
