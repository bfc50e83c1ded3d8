"""A run leaves as a folder and comes back: what is in it, and one line for every mistake."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from launcher.cli import run
from tests.launcher.handmade import make_wheel
from tests.trainer.replica.torch.parallel.models import write_drawn_model
from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.config.run import RunConfig, load
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.optimizer.adamw import TrainState
from trainer.system.storage import lease

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


def run_id_of(folder: Path) -> str:
    return json.loads((folder / "export.json").read_text())["run_id"]


def train(folder: Path, *steps: int, state: str = "stopped", run_id: str = "") -> None:
    """Leave in an exported folder what a trainer leaves there: checkpoints, status, metrics."""
    run_id = run_id or run_id_of(folder)
    config = load(folder / "run.yaml", {"model.path": str(folder / "inputs/model")})
    write_output(folder / "output", config, run_id, *steps, state=state)


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
        store.save(state_then.snapshot(), RunProgress(run_id, step, 0, 8, 0, 0, tree))
    status = {"run_id": run_id, "state": state, "step": steps[-1], "total_steps": 8}
    (output / "status.json").write_text(json.dumps(status))
    lines = ({"kind": "step", "step": step, "loss": 1.0} for step in range(1, steps[-1] + 1))
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["runs", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


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
    config = load(folder / "run.yaml")
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
    found = load(export("priced", "--config", str(own)) / "run.yaml").budget
    assert found is not None
    assert (found.ceiling, found.ledger) == (5.0, None)
    assert [(one.name, one.price_hour) for one in found.hosts] == [("rack", 3.0)]
    own.write_text(yaml.safe_dump({"task": "causal-lm", "budget": {**budget, "hosts": []}}))
    command = ["export", "--to", "slurm", *TARGET, *inputs, "--config", str(own)]
    assert "no host has a price" in refused([*command, "--into", str(tmp_path / "x")], 2, capsys)
    assert not (tmp_path / "x").exists()


def test_a_run_comes_home_is_listed_and_goes_out_again(
    export: Export, inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away, home = export(), tmp_path / "home"
    run_id = run_id_of(away)
    train(away, 2, 4)
    assert run(["import-run", str(away)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"run {run_id}: stopped at step 4, in {home}",
        f"resume it here with: launch cluster up --resume {run_id}",
    ]
    assert sorted(path.name for path in (home / "checkpoints").glob("[a-z]*")) == [
        "latest",
        "step-000004",
    ]
    assert (home / "checkpoints/latest").readlink() == Path("step-000004")
    (one,) = listed(capsys)
    assert (one["run_id"], one["state"], one["output"]) == (run_id, "stopped", str(home))
    kept = yaml.safe_load((tmp_path / f"state/runs/{run_id}/run.yaml").read_text())
    assert kept["output"] == str(home)

    wheel = inputs[inputs.index("--wheel") : inputs.index("--wheel") + 2]
    again = tmp_path / "again"
    order = ["export", "--to", "torchrun", *TARGET, "--run", run_id, *wheel, "--into", str(again)]
    assert run(order) == 0, capsys.readouterr().err
    assert "from step 4" in capsys.readouterr().out
    assert (again / "output/checkpoints/step-000004/manifest.json").is_file()
    assert len((again / "output/metrics.jsonl").read_text().splitlines()) == 4

    train(again, 4, 8, state="completed")
    assert run(["import-run", str(again), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"]) == ("completed", 8)
    assert [one["state"] for one in listed(capsys)] == ["completed"]
    assert (home / "checkpoints/latest").readlink() == Path("step-000008")

    # What is behind changes nothing, however often it comes.
    line = refused(["import-run", str(away)], 2, capsys)
    assert f"run {run_id} is at step 8 here, and at 4 in the result" in line
    assert [one["state"] for one in listed(capsys)] == ["completed"]


def test_what_a_run_has_cost_goes_along_and_comes_home(
    export: Export, inputs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ceiling holds for all places together, and an import that is repeated adds nothing."""
    own = tmp_path / "own.yaml"
    budget = {"ceiling": 5.0, "currency": "EUR", "hosts": [{"name": "rack", "price_hour": 3.0}]}
    own.write_text(yaml.safe_dump({"task": "causal-lm", "budget": budget}))
    away = export("it's away", "--config", str(own))
    run_id = run_id_of(away)
    train(away, 4)
    spent = {"seconds": 360.0, "kwh": 0.0, "measured": 0.0, "money": 0.3, "currency": "EUR"}
    line = {"run": run_id, "host": "rack", "until": 1000.0, **spent, "end": True}
    foreign = {**line, "run": "another", "money": 9.0}
    ledger = away / "output/spend.jsonl"
    ledger.write_text("".join(json.dumps(one) + "\n" for one in (line, foreign)))
    for _ in range(2):
        assert run(["import-run", str(away)]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert run(["spend", "--json"]) == 0
        (total,) = json.loads(capsys.readouterr().out)["totals"]
        assert (total["name"], total["money"], total["seconds"]) == (run_id, 0.3, 360.0)

    wheel = inputs[inputs.index("--wheel") : inputs.index("--wheel") + 2]
    again = tmp_path / "it's back"
    order = ["export", "--to", "slurm", *TARGET, "--run", run_id, *wheel, "--into", str(again)]
    assert run(order) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert json.loads((again / "output/spend.jsonl").read_text())["money"] == 0.3
    assert said.endswith(f"launch import-run {shlex.quote(str(again))}\n")

    for odd in (
        "nonsense",
        json.dumps({**line, "until": 1e300}),
        json.dumps({**line, "money": -1}),
    ):
        ledger.write_text(odd + "\n")
        assert str(ledger) in refused(["import-run", str(away)], 2, capsys)


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(
    export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = export()
    train(away, 4)
    weights = away / "output/checkpoints/step-000004/adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    line = refused(["import-run", str(away)], 2, capsys)
    assert f"{weights}: its bytes are not those in the manifest; copy it again" in line
    assert not [path for path in (tmp_path / "home").rglob("step-*") if path.is_dir()]
    assert listed(capsys) == []


def test_links_of_a_folder_that_was_elsewhere_lead_nowhere(
    export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = export()
    train(away, 4)
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    metrics, best = away / "output/metrics.jsonl", away / "output/checkpoints/best"
    metrics.unlink()
    metrics.symlink_to(secret)
    best.symlink_to("/etc")
    assert run(["import-run", str(away)]) == 0, capsys.readouterr().err
    assert not (tmp_path / "home/metrics.jsonl").exists()
    assert not (tmp_path / "home/checkpoints/best").is_symlink()


def damage_with(kind: str, step: Path) -> None:
    """Put into a checkpoint what a trainer never writes."""
    weights = step / "adapter_model.safetensors"
    if kind == "link":
        weights.unlink()
        weights.symlink_to("/etc/hostname")
    elif kind == "pipe":
        os.mkfifo(step / "more")
    elif kind == "sparse":
        os.truncate(weights, shutil.disk_usage(step).free + (1 << 40))
    elif kind == "manifest":
        os.truncate(step / "manifest.json", 1 << 30)
    elif kind == "linked folder":
        step.rename(step.with_name("elsewhere"))
        step.symlink_to("elsewhere")
    else:
        step.rename(step.with_name("step-999999999999"))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("link", "is no regular file"),
        ("pipe", "is no regular file"),
        ("linked folder", "is no regular file"),
        ("sparse", "has room for"),
        ("manifest", "is larger than 4 MiB"),
        ("step", "the run has 8 steps"),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_it_is_read(
    kind: str, says: str, export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = export()
    train(away, 4)
    damage_with(kind, away / "output/checkpoints/step-000004")
    assert says in refused(["import-run", str(away)], 2, capsys)
    assert not (tmp_path / "home/checkpoints").exists()
    assert listed(capsys) == []


def test_a_foreign_record_names_no_folder_to_write_to(
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = export()
    train(away, 4)
    record = json.loads((away / "export.json").read_text())
    victim = tmp_path / "victim"
    record["home"].setdefault("checkpoint", {})["folder"] = str(victim)
    (away / "export.json").write_text(json.dumps(record))
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "other-laptop"))
    assert run(["import-run", str(away), "-o", str(tmp_path / "there")]) == 0
    assert not victim.exists()
    assert (tmp_path / "there/checkpoints/step-000004").is_dir()


def test_another_machine_has_to_be_told_where_the_result_goes(
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = export()
    train(away, 4)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "other-laptop"))
    assert "was not exported here; name the folder for its result: -o DIR" in refused(
        ["import-run", str(away)], 2, capsys
    )
    there = tmp_path / "there"
    assert run(["import-run", str(away), "-o", str(there)]) == 0
    (one,) = listed(capsys)
    assert one["output"] == str(there)
    other = str(tmp_path / "elsewhere")
    line = refused(["import-run", str(away), "-o", other], 2, capsys)
    assert line.endswith(f"has its output in {there}; leave out -o")


def test_an_output_folder_of_another_run_or_in_use_is_left_alone(
    export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away, home = export(), tmp_path / "home"
    train(away, 4)
    config = load(away / "run.yaml", {"model.path": str(away / "inputs/model")})
    write_output(home, config, "another", 2)
    line = refused(["import-run", str(away)], 2, capsys)
    assert line == f"launch: {home}: holds run another; name another folder: -o DIR"
    shutil.rmtree(home)
    held = lease.take(home, "busy")
    try:
        assert "busy" in refused(["import-run", str(away)], 4, capsys)
    finally:
        held.release()


@pytest.mark.parametrize("what", ["no folder", "not ours", "no result", "of another run"])
def test_what_is_no_result_is_one_line(
    what: str, export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, says = tmp_path / "nothing", "No such file or directory; give a folder that launch"
    if what == "not ours":
        folder.mkdir()
        (folder / "export.json").write_text('{"schema": "motley.export/1", "run_id": "../x"}')
        says = "not of motley.export/1"
    elif what != "no folder":
        folder, says = export(), "copy output/ back from where it ran"
        if what == "of another run":
            train(folder, 4, run_id="another")
    assert says in refused(["import-run", str(folder)], 2, capsys)


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
    config = load(tmp_path / "away/run.yaml")
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
    config = load(tmp_path / "away/run.yaml")
    assert (config.data.train, config.data.validation) == (hub, f"{hub}/test.jsonl")
    assert [path.name for path in (tmp_path / "away/inputs").iterdir()] == ["model"]
