"""`trainer finetune --role local`: the loop and the state machine without a network."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import click.testing
import pytest

from launcher.plan.configuration import with_shared_checkpoints
from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.reader import find_checkpoint, read_progress
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.merge import merge
from trainer.config.run import RunConfig, load_config
from trainer.exchange.protocol.actions import Step
from trainer.run.composition import record, roles
from trainer.run.composition import run as build
from trainer.run.composition.roles import Placement
from trainer.run.inputs import read_inputs
from trainer.system.errors import InputError, StorageError
from trainer.tracking.metrics import read_metrics
from trainer.tracking.run_recorder import RunRecorder

OF_MODEL = ("model_digest", "base_digest")
ALONE = Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    write_data(folder / "train.jsonl", count=20)
    return write_model(folder / "model", folder / "train.jsonl")


def config(model: Path, output: Path, **settings: object) -> RunConfig:
    data = str(model.parent / "train.jsonl")
    overrides = {
        "num_classes": 3,
        "method": "full",
        "model.path": str(model),
        "data.train": data,
        "data.validation": data,
        "output": str(output),
        "training.batch_size": 8,
        "training.epochs": 2,
        "training.micro_batch_size": 4,
        "exchange.hash_every": 2,
        "checkpoint.every": 2,
    }
    return load_config(None, overrides | settings)


def weights(output: Path) -> str:
    return json.loads((output / "checkpoints/latest/run.json").read_bytes())["weights_digest"]


def test_a_run_from_data_to_checkpoint(model: Path, tmp_path: Path):
    assert roles.run_local(config(model, tmp_path), "run", ALONE) == 0
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    steps = [record for record in metrics if record["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["sample_ranges"] for step in steps[:3]] == [
        [[0, 0, 8]],
        [[0, 8, 16]],
        [[0, 16, 20]],
    ]
    assert {r["at_step"] for r in metrics if r.get("event") == "verified"} >= {2, 4, 6}
    status = json.loads((tmp_path / "status.json").read_bytes())
    assert (status["state"], status["step"], status["validation"]["step"]) == ("completed", 6, 6)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    # One that waits for a busy disk gives way to the next; the last one is always written.
    assert {"latest", "best", "step-000006"} <= names
    known = {"latest", "best", "step-000002", "step-000004", "step-000006"}
    assert {name for name in names if not name.startswith(".lease-")} <= known


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("loss", ["gone", "emptied", "cut", "damaged"])
def test_a_run_whose_checkpoints_are_lost_does_not_begin_again(
    model: Path, tmp_path: Path, loss: str, elsewhere: bool
) -> None:
    """A share that is not mounted, too: an empty folder, or none, where the mount point was."""
    output = tmp_path / "out"
    folder = tmp_path / "share" / "run" if elsewhere else output / "checkpoints"
    place = {"checkpoint.folder": str(folder)} if elsewhere else {}
    settings = config(model, output, **place)
    assert roles.run_local(settings, "run", ALONE) == 0
    before = (output / "metrics.jsonl").read_bytes()
    away = tmp_path / "away"
    folder.rename(away)
    if loss != "gone":
        folder.mkdir()
    if loss in ("cut", "damaged"):  # the one that is left
        shutil.copytree(away / "step-000006", folder / "step-000006")
        weights = folder / "step-000006" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content if loss == "damaged" else content[:-1])

    kind = InputError if loss == "damaged" else StorageError
    with pytest.raises(kind, match=f"^{folder}: .*give another -o to begin at step 0$") as caught:
        roles.run_local(settings, "run", ALONE)

    text = str(caught.value)
    expected = {
        "gone": "is missing, though",
        "damaged": "no checkpoint of this run is intact",
    }.get(loss, "contains no complete checkpoint, though")
    assert expected in text
    if loss != "damaged":
        assert f"{output / 'metrics.jsonl'} records one of step 6; mount or restore" in text
        assert folder.exists() == (loss != "gone"), "nothing is made below a mount point"
    assert (output / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)  # it is mounted
    assert roles.run_local(settings, "run", ALONE) == 0
    resumed = [r for r in read_metrics(output / "metrics.jsonl") if r.get("event") == "resumed"]
    assert [event["step"] for event in resumed] == [6]


def test_a_share_of_the_data_is_held_out(model: Path, tmp_path: Path):
    held: dict[str, object] = {"data.validation": None, "data.validation_fraction": 0.1}
    assert roles.run_local(config(model, tmp_path, **held), "run", ALONE) == 0
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    steps = [record for record in metrics if record["kind"] == "step"]
    assert [step["sample_ranges"] for step in steps[:3]] == [
        [[0, 0, 8]],
        [[0, 8, 16]],
        [[0, 16, 18]],
    ]
    status = json.loads((tmp_path / "status.json").read_bytes())
    assert status["validation"]["step"] == 6


def test_the_settings_of_a_run_stand_beside_its_results(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    short = load_config(
        None,
        {
            "model.path": "model",
            "data.train": "train.jsonl",
            "num_classes": 3,
            "output": str(tmp_path),
            "training.max_steps": 1,
        },
    )
    file = tmp_path / "run.yaml"
    monkeypatch.chdir(model.parent)
    assert roles.run_local(short, "run", ALONE) == 0
    monkeypatch.chdir("/")
    kept = load_config(file)
    assert (kept.model.path, kept.data.train) == (str(model), str(model.parent / "train.jsonl"))
    assert (kept.training, kept.output) == (short.training, str(tmp_path))
    more = load_config(file, {"training.max_steps": 2})
    assert roles.run_local(more, "run", ALONE) == 0
    assert load_config(file) == more

    file.write_text(f"# my own\n{more.to_yaml()}")
    before = file.read_bytes()
    assert roles.run_local(load_config(file, {"training.max_steps": 3}), "run", ALONE) == 0
    assert file.read_bytes() == before


def test_resuming_continues_with_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that is stopped during its third step ends like one that never was."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert roles.run_local(config(model, whole), "run", ALONE) == 0

    class StopInThird(RunRecorder):
        interrupt = None

        def log_step(self, event: Step) -> None:
            super().log_step(event)
            if event.step == 2:
                assert StopInThird.interrupt
                StopInThird.interrupt("the test says so")

    with monkeypatch.context() as patch:
        patch.setattr(record, "RunRecorder", StopInThird)
        patch.setattr(roles, "interrupt_on_signals", lambda f: setattr(StopInThird, "interrupt", f))
        assert roles.run_local(config(model, parts), "run", ALONE) == 0
    status = json.loads((parts / "status.json").read_bytes())
    assert (status["state"], status["step"]) == ("stopped", 3)
    assert status["reason"] == "the test says so"
    assert weights(parts) != weights(whole)

    monkeypatch.setattr(roles, "interrupt_on_signals", lambda _interrupt: None)
    assert roles.run_local(config(model, parts), "run", ALONE) == 0
    assert weights(parts) == weights(whole)
    losses = [
        [
            (r["step"], r["loss"])
            for r in read_metrics(output / "metrics.jsonl")
            if r["kind"] == "step"
        ]
        for output in (whole, parts)
    ]
    assert losses[0] == losses[1]


def test_checkpoints_may_lie_elsewhere_and_are_found_from_the_output(model: Path, tmp_path: Path):
    """Metrics and status stay in the output folder, which links to the other place."""
    output, share = tmp_path / "output", tmp_path / "share" / "run"
    short: dict[str, object] = {"training.max_steps": 1}
    elsewhere = config(model, output, **short, **{"checkpoint.folder": str(share)})
    assert roles.run_local(elsewhere, "run", ALONE) == 0
    assert find_checkpoint(output).resolve().parent == share
    assert {path.name for path in output.iterdir() if not path.is_symlink()} >= {
        "metrics.jsonl",
        "status.json",
    }
    assert roles.run_local(elsewhere, "run", ALONE) == 0  # goes on where it stands: at its end
    inputs = read_inputs(config(model, output, **short), "run")
    with pytest.raises(InputError, match=r"from a run with checkpoint\.folder"):
        build.make_coordinator(inputs, 1, 0.0)
    other = config(model, output, **short, **{"checkpoint.folder": str(tmp_path / "other")})
    with pytest.raises(InputError, match=r"contains other checkpoints than checkpoint\.folder"):
        build.make_coordinator(read_inputs(other, "run"), 1, 0.0)


def test_a_run_from_the_file_of_one_on_a_share_has_checkpoints_of_its_own(
    model: Path, tmp_path: Path
):
    """As `launch cluster up` puts them on a share: in a folder named after the run."""
    share = tmp_path / "share"
    short = config(model, tmp_path / "first", **{"training.max_steps": 1})
    first = with_shared_checkpoints(short, str(share), "run-1")
    assert roles.run_local(first, "run-1", ALONE) == 0
    again = load_config(tmp_path / "first" / "run.yaml", {"output": str(tmp_path / "second")})
    second = with_shared_checkpoints(again, str(share), "run-2")
    assert roles.run_local(second, "run-2", ALONE) == 0
    for output, run_id in (("first", "run-1"), ("second", "run-2")):
        checkpoint = find_checkpoint(tmp_path / output).resolve()
        assert checkpoint.parent == share / "checkpoints" / run_id
        assert read_progress(checkpoint).run_id == run_id
    assert weights(tmp_path / "first") == weights(tmp_path / "second")


def test_a_checkpoint_folder_of_the_users_stays_in_the_run_file(model: Path, tmp_path: Path):
    short: dict[str, object] = {"training.max_steps": 1, "checkpoint.folder": str(tmp_path / "c")}
    assert roles.run_local(config(model, tmp_path / "first", **short), "run-1", ALONE) == 0
    again = load_config(tmp_path / "first" / "run.yaml", {"output": str(tmp_path / "second")})
    inputs = read_inputs(again, "run-2")
    with pytest.raises(InputError, match=r"of run run-1; give another checkpoint\.folder and -o"):
        build.make_coordinator(inputs, 1, 0.0)


def test_another_run_keeps_out_of_the_output_folder(model: Path, tmp_path: Path):
    settings = config(model, tmp_path, **{"training.max_steps": 1})
    assert roles.run_local(settings, "first", ALONE) == 0
    inputs = read_inputs(settings, "second")
    with pytest.raises(InputError, match="contains the checkpoints of run first; give another -o"):
        build.make_coordinator(inputs, 1, 0.0)
    changed = read_inputs(config(model, tmp_path, **{"optimizer.learning_rate": 1.0}), "first")
    with pytest.raises(InputError, match=r"settings have changed \(optimizer.learning_rate: "):
        build.make_coordinator(changed, 1, 0.0)
    same = read_inputs(settings, "first")
    moved = replace(same, job=replace(same.job, data_digest="0" * 64))
    with pytest.raises(InputError, match="cannot resume from here: its data has changed"):
        build.make_coordinator(moved, 1, 0.0)


def test_another_base_of_the_same_shapes_is_another_run(model: Path, tmp_path: Path) -> None:
    short: dict[str, object] = {"method": "lora", "training.max_steps": 1}
    assert roles.run_local(config(model, tmp_path / "out", **short), "run", ALONE) == 0
    adapter = find_checkpoint(tmp_path / "out")
    (tmp_path / "drawn").mkdir()
    shutil.copy(model.parent / "train.jsonl", tmp_path / "drawn")
    drawn = write_model(tmp_path / "drawn" / "model", model.parent / "train.jsonl", seed=1)
    # The same model with another chat template: the samples of the same data are others.
    worded = shutil.copytree(model, tmp_path / "worded")
    (worded / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for other, why in ((drawn, "other weights in"), (worded, "other config or tokenizer in")):
        longer = {**short, "training.max_steps": 2, "model.path": str(other)}
        inputs = read_inputs(config(model, tmp_path / "out", **longer), "run")
        with pytest.raises(InputError, match=rf"its model has changed \({why} {other}\)"):
            build.make_coordinator(inputs, 1, 0.0)
    for act in (partial(load_trained, adapter), lambda base: open_adapter(adapter, base)):
        with pytest.raises(InputError, match=f"was trained on another base than {drawn}"):
            act(str(drawn))
    words = [str(tmp_path / "out"), "-o", str(tmp_path / "merged"), "--base", str(drawn)]
    refused = click.testing.CliRunner().invoke(merge, words)
    assert f"was trained on another base than {drawn}" in str(refused.exception)
    assert not (tmp_path / "merged").exists()
    moved = tmp_path / "adapter"  # without the run's own record, as it is published
    moved.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, moved)
    with pytest.raises(InputError, match=f"was trained on another base than {drawn}"):
        load_trained(moved, str(drawn))
    assert load_trained(moved, str(worded)).base_dir == worded
    # Runs from before the digest was kept go on.
    run = adapter / "run.json"
    tree = {key: v for key, v in json.loads(run.read_bytes()).items() if key not in OF_MODEL}
    run.write_text(json.dumps(tree))
    assert read_progress(adapter).model_digest is None


def test_lora_on_random_weights_is_warned_about(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    read_inputs(config(model, tmp_path), "run", said.append)
    assert not any("its weights are random" in line for line in said), "method full"
    short: dict[str, object] = {"method": "lora", "training.max_steps": 1}
    read_inputs(config(model, tmp_path, **short), "run", said.append)
    assert f"{model}: its weights are random, and LoRA changes too few of them" in "\n".join(said)
    trained = config(model, tmp_path / "full", **{"training.max_steps": 1})
    assert roles.run_local(trained, "run", ALONE) == 0
    on_it: dict[str, object] = {**short, "model.path": str(tmp_path / "full" / "model")}
    said.clear()
    read_inputs(config(model, tmp_path, **on_it), "run", said.append)
    assert not any("its weights are random" in line for line in said)


def test_a_run_that_is_extended_says_what_its_learning_rate_does(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainer.tracking.run_recorder")
    for steps in (4, 4, 8):
        settings = config(model, tmp_path, **{"training.max_steps": steps})
        assert roles.run_local(settings, "run", ALONE) == 0
    (line,) = (record.message for record in caplog.records if "schedule" in record.message)
    rates = {
        record["step"]: record["learning_rate"]
        for record in read_metrics(tmp_path / "metrics.jsonl")
        if record["kind"] == "step"
    }
    assert rates[5] > 2 * rates[4]
    assert line == (
        "the run is extended from 4 to 8 steps: its schedule spans all of them, so the"
        f" learning rate goes from {rates[4]:.1e} to {rates[5]:.1e} at step 5"
    )


def test_addresses_off_loopback_need_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MOTLEY_TLS_DIR", raising=False)
    monkeypatch.setattr(roles, "TLS_HOME", tmp_path / "none")
    assert ALONE.find_certificates("coordinator", "127.0.0.1") is None
    with pytest.raises(InputError, match="TLS is needed: give --tls DIR"):
        ALONE.find_certificates("coordinator", "192.168.1.5")
    (tmp_path / "rank-1").mkdir()
    given = replace(ALONE, tls_dir=str(tmp_path))
    assert given.find_certificates("rank-1", "192.168.1.5") == tmp_path / "rank-1"
    assert given.find_certificates("rank-2", "192.168.1.5") == tmp_path


def test_a_worker_without_a_rank_takes_its_only_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MOTLEY_TLS_DIR", raising=False)
    monkeypatch.setattr(roles, "TLS_HOME", tmp_path)
    assert ALONE.find_worker_certificates("127.0.0.1") is None
    with pytest.raises(InputError, match="TLS is needed: give --tls DIR"):
        ALONE.find_worker_certificates("192.168.1.5")
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "rank-2").mkdir()
    for place in (ALONE, replace(ALONE, tls_dir=str(tmp_path)), replace(ALONE, rank=2)):
        assert place.find_worker_certificates("192.168.1.5") == tmp_path / "rank-2"
    (tmp_path / "rank-3").mkdir()
    with pytest.raises(InputError, match="certificates of 2 ranks: give --rank"):
        ALONE.find_worker_certificates("192.168.1.5")
    assert replace(ALONE, rank=3).find_worker_certificates("192.168.1.5") == tmp_path / "rank-3"
    monkeypatch.setenv("MOTLEY_TLS_DIR", str(tmp_path / "rank-3"))
    assert ALONE.find_worker_certificates("192.168.1.5") == tmp_path / "rank-3"  # its own folder


def test_what_the_data_holds_and_what_is_changed_is_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "trainer.run.composition.roles")
    known = tmp_path / "short"
    shutil.copytree(model, known)
    tree = json.loads((known / "config.json").read_text())
    (known / "config.json").write_text(json.dumps({**tree, "max_position_embeddings": 8}))
    settings: dict[str, object] = {"model.path": str(known), "training.max_steps": 7}
    assert roles.run_local(config(model, tmp_path / "out", **settings), "run", ALONE) == 0
    lines = [record.message for record in caplog.records]
    assert f"data.max_seq_len is lowered to 8: {known} has no more positions" in lines
    assert any(line.startswith("data: 20 samples, ") for line in lines)
    assert any("longer than max_seq_len 8 and cut" in line for line in lines)
    assert "training.max_steps 7 are 2.3 epochs, not 2" in lines
    status = json.loads((tmp_path / "out" / "status.json").read_bytes())
    assert (status["step"], status["total_steps"]) == (7, 7)
    with pytest.raises(InputError, match=f"max_seq_len 9: {known} has 8 positions"):
        read_inputs(config(model, tmp_path, **settings, **{"data.max_seq_len": 9}), "run")


def test_a_step_without_a_token_to_learn_has_no_loss(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A loss of zero would look like a perfect model."""
    data = tmp_path / "train.jsonl"
    rows = [{"prompt": "p " * 120, "completion": str(n)} for n in range(3)]
    rows.append({"prompt": "a ", "completion": "b"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"task": "causal-lm", "num_classes": None, "data.train": str(data)}
    settings |= {"data.validation": None, "data.max_seq_len": 32, "training.batch_size": 1}
    run = config(model, tmp_path / "output", **settings, **{"training.epochs": 1})
    assert roles.run_local(run, "run", ALONE) == 0
    metrics = read_metrics(tmp_path / "output/metrics.jsonl")
    losses = [record["loss"] for record in metrics if record["kind"] == "step"]
    assert losses.count(None) == 3
    (loss,) = (loss for loss in losses if loss is not None)
    assert loss > 1
    status = json.loads((tmp_path / "output/status.json").read_bytes())
    assert status["loss"] == losses[-1]
    shown = "-" if losses[-1] is None else f"{losses[-1]:.4f}"
    assert f"step 4, loss {shown}, in" in status["summary"][1]
    printed = capsys.readouterr().err
    assert f"loss {shown}" in printed
    assert "0.0000" not in printed
