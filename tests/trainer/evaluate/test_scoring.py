"""Trained models come back from every kind of folder with the same figures."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click.testing
import numpy as np
import pytest

from tests.covering import covering
from tests.trainer import small_model as small
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.evaluate import evaluate
from trainer.evaluate.scoring import EvaluationScores, score_file
from trainer.model.initialization import draw_uniform, initial_weights
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.optimizer.adamw import TrainState
from trainer.planning.model_config import read_shape
from trainer.planning.replica import USABLE, plan_memory
from trainer.replica.backend import Compute
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig
    from trainer.system.backends import RequestedBackend


PEFT_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def train(output: Path, model: Path, make_config: MakeConfig, **settings: Any) -> Path:
    """Leave an output folder whose weights are random: nothing about it is a special case."""
    settings = {"num_classes": 3, "data__max_seq_len": 24, **settings}
    if settings.get("task") == "causal-lm":
        del settings["num_classes"]
    config = make_config(model, **settings)
    layout = build_layout(model, config)
    weights = initial_weights(layout, model, config)
    for slot in layout.iter_tensors():
        if slot.name.endswith(("lora_B.weight", "score.weight")):
            weights[slot.start : slot.stop] = draw_uniform(3, slot.name, slot.size, 0.5)
    zeros = np.zeros_like(weights)
    state = TrainState(weights, zeros, zeros.copy(), step=4)
    store = CheckpointStore(output / "checkpoints", layout, config, model)
    progress = RunProgress("run", 4, 0, 8, 0, 0, config.model_dump(mode="json"))
    return store.save(state.take_snapshot(), progress, metric=0.5)


def test_a_full_model_is_evaluated_where_it_could_not_be_trained(
    model: Path,
    data: Path,
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainer.replica.torch import replica

    trained = load_trained(train(tmp_path, model, make_config, method="full"))
    config = trained.config.with_settings({"training.gradient_checkpointing": "on"})
    shape, headers = read_shape(trained.base_dir), read_headers(trained.base_dir)
    plan = partial(plan_memory, shape, headers, trained.layout, config, recompute=True)
    free = int(plan(accelerator=False, evaluates=True).least / USABLE) + 1
    expected = score_file(trained, data, Compute("cpu")).loss
    monkeypatch.setattr(replica, "available_bytes", lambda _device: free)
    assert score_file(trained, data, Compute("cpu")).loss == pytest.approx(expected, rel=1e-6)
    with pytest.raises(InputError, match=r"the run needs .* are free"):
        replica.TorchReplica(trained.base_dir, config, trained.layout)


NF4 = {"model__quantization": "nf4"}
USES = [
    use
    for backend, families in (("cpu", ("qwen3", *small.DEEP_FAMILIES)), ("wgpu", ("qwen3",)))
    for use in covering(
        (backend, family, task, kind, resident)
        for family in families
        for task in ("classify", "causal-lm")
        for kind in (
            *("full", "full in bf16", "full in nf4"),
            *("lora", "lora in bf16", "lora in nf4", "nf4"),
        )
        for resident in (0, 4)
    )
]


@pytest.mark.parametrize(("backend", "family", "task", "kind", "resident"), USES)
def test_scores_are_those_of_the_resident_model(
    request: pytest.FixtureRequest,
    deep_model: Path,
    data: Path,
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    backend: RequestedBackend,
    family: str,
    task: str,
    kind: str,
    resident: int,
) -> None:
    from safetensors.torch import load_file, save_file

    if backend == "wgpu":
        request.getfixturevalue("vulkan")
        from trainer.replica.wgpu import replica
    else:
        from trainer.replica.torch import replica

    method, _, narrow = kind.partition(" in ")
    settings: dict[str, Any] = {"task": task, **(NF4 if method == "nf4" else {})}
    if narrow == "bf16" and method == "lora":
        settings["model__dtype"] = "bfloat16"
    settings["method"] = "full" if method == "full" else "lora"
    if method != "full":  # experts with adapters: other bits
        settings["lora__target_modules"] = ["q_proj", "v_proj"]
    folder = deep_model
    if family != "qwen3":
        folder = small.write_family(
            tmp_path / "model", deep_model, family, **small.DEEP_FAMILIES[family]
        )
    folder = train(tmp_path / "run", folder, make_config, **settings)
    if narrow == "bf16" and method == "full":
        path = folder / "model.safetensors"
        stored = {name: each.bfloat16() for name, each in load_file(path).items()}
        folder = shutil.copytree(folder, tmp_path / "narrow", ignore=lambda *_: ["run.json"])
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if task == "causal-lm":
        data = tmp_path / "texts.jsonl"
        data.write_text('{"text": "mkdir -p build"}\n{"text": "echo hello"}\n')
    made: list[Any] = []
    load = replica.load_model

    def keep(*given: Any, **named: Any) -> Any:
        made.append(load(*given, **named))
        return made[-1]

    monkeypatch.setattr(replica, "load_model", keep)
    trained = load_trained(folder, max_seq_len=24)
    packed = "nf4" if narrow == "nf4" else None
    found = [
        score_file(trained, data, Compute(backend, threads=1, resident=asked, quantization=packed))
        for asked in ("all", resident)
    ]
    assert found[0] == found[1]
    if packed:
        plain = score_file(trained, data, Compute(backend, threads=1, resident="all"))
        assert found[0] != plain
        assert found[0].loss == pytest.approx(plain.loss, rel=0.1)
        made.pop()
    assert [count_streamed(each) for each in made] == [0, 6 - resident]


def count_streamed(model: Any) -> int:
    from trainer.replica.torch.streaming import StreamedLinear

    if hasattr(model, "uploads"):
        return len(model.uploads._order) if model.uploads else 0
    return len({each._layer for each in model.modules() if isinstance(each, StreamedLinear)})


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_larger_than_the_memory_is_evaluated(
    deep_model: Path,
    data: Path,
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    from trainer.replica.torch import replica

    caplog.set_level("INFO")
    trained = load_trained(train(tmp_path, deep_model, make_config, method=method))
    config = trained.config.with_settings({"training.gradient_checkpointing": "on"})
    shape, headers = read_shape(trained.base_dir), read_headers(trained.base_dir)
    plan = partial(plan_memory, shape, headers, trained.layout, config, recompute=True)
    plan = partial(plan, accelerator=False, evaluates=True)
    expected = score_file(trained, data, Compute("cpu"))
    free = int(plan(resident=1).least / USABLE) + 1
    assert free < plan().least / USABLE
    monkeypatch.setattr(replica, "available_bytes", lambda _device: free)
    found = score_file(trained, data, Compute("cpu"))  # in smaller micro-batches
    assert replace(found, loss=expected.loss) == expected
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    # One could stay, but then more micro-batches would each read the five others.
    assert "cpu: 0 of 6 layers stay in memory, 6 are read from" in caplog.text
    with pytest.raises(InputError, match="are free; use --resident auto or a device with more"):
        score_file(trained, data, Compute("cpu", resident="all"))


@pytest.mark.filterwarnings(PEFT_WARNING)
def test_an_adapter_from_every_folder_and_through_peft(
    model: Path, data: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    import peft
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    checkpoint = train(tmp_path / "output", model, make_config)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(checkpoint / name, adapter)
    found = [
        score_file(load_trained(folder, max_seq_len=24), data, Compute("cpu", threads=1))
        for folder in (tmp_path / "output", checkpoint.parent, checkpoint, adapter)
    ]
    assert found.count(found[0]) == 4
    scores = found[0]
    assert scores.confusion is not None
    assert (scores.count, scores.weight, scores.task) == (40, 40, "classify")

    # The merged model is a full model with the same figures.
    merged = merge_adapter(open_adapter(checkpoint)[0], tmp_path / "merged")
    again = score_file(load_trained(merged, max_seq_len=24), data, Compute("cpu", threads=1))
    assert again.confusion == scores.confusion
    assert again.loss == pytest.approx(scores.loss, rel=1e-5)

    # PEFT on the adapter and transformers on the merged model agree with both.
    base = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    wrapped = peft.PeftModel.from_pretrained(base, checkpoint).eval()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(merged).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    batch = tokenizer(
        [line["input"] for line in lines],
        padding=True,
        truncation=True,
        max_length=24,
        return_tensors="pt",
    )
    labels = torch.tensor([line["label"] for line in lines])
    with torch.no_grad():
        for logits in (wrapped(**batch).logits, plain(**batch).logits):
            loss = torch.nn.functional.cross_entropy(logits, labels)
            assert float(loss) == pytest.approx(scores.loss, rel=1e-4)
            confusion = np.zeros((3, 3), dtype=int)
            np.add.at(confusion, (labels.numpy(), logits.argmax(-1).numpy()), 1)
            assert confusion.tolist() == scores.confusion


def test_figures_are_those_of_sklearn(
    model: Path, data: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    train(tmp_path / "output", model, make_config, method="full")
    scores = score_file(load_trained(tmp_path / "output"), data, Compute("cpu", threads=1))
    assert scores.confusion is not None
    labels, predictions = [], []
    for label, row in enumerate(scores.confusion):
        for prediction, count in enumerate(row):
            labels += [label] * count
            predictions += [prediction] * count
    assert scores.accuracy == pytest.approx(sklearn.accuracy_score(labels, predictions))
    assert scores.mcc == pytest.approx(sklearn.matthews_corrcoef(labels, predictions))


def test_nothing_is_said_of_gradients(
    model: Path,
    data: Path,
    tmp_path: Path,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(tmp_path / "output", model, make_config)
    with caplog.at_level("INFO"):
        score_file(load_trained(tmp_path / "output"), data, Compute("cpu", threads=1))
    assert "gradient" not in caplog.text


@pytest.mark.parametrize("method", ["lora", "full"])
def test_language_models(
    model: Path, data: Path, tmp_path: Path, make_config: MakeConfig, method: str
) -> None:
    train(tmp_path / "output", model, make_config, task="causal-lm", method=method)
    scores = score_file(load_trained(tmp_path / "output"), data, Compute("cpu", threads=1))
    assert scores.task == "causal-lm"
    assert scores.perplexity == pytest.approx(np.exp(scores.loss))
    assert scores.weight > scores.count == 40
    assert scores.confusion is None
    base = score_file(load_trained(model, max_seq_len=24), data, Compute("cpu", threads=1))
    assert (base.loss == scores.loss) == (method == "full")  # full training was left at its start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved_as", ["causal-lm", "bare"])
def test_merging_keeps_the_dtype_and_untouched_tensors(
    tiny_model: Any, tmp_path: Path, make_config: MakeConfig, dtype: str, saved_as: str
) -> None:
    import safetensors.torch
    import torch

    base = tiny_model(dtype=dtype, saved_as=saved_as)
    checkpoint = train(tmp_path / "out", base, make_config, lora__target_modules=["q_proj"])
    merged = merge_adapter(open_adapter(checkpoint)[0], tmp_path / "merged")
    before = safetensors.torch.load_file(base / "model.safetensors")
    after = safetensors.torch.load_file(merged / "model.safetensors")
    assert after.pop("score.weight").shape == (3, 64)
    adapter = safetensors.torch.load_file(checkpoint / "adapter_model.safetensors")
    for name, tensor in after.items():
        stored = before[name.removeprefix("model.") if saved_as == "bare" else name]
        assert tensor.dtype == stored.dtype == getattr(torch, dtype)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            product = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            expected = (stored.float() + 2.0 * product).to(stored.dtype)
            torch.testing.assert_close(tensor, expected)
            assert not torch.equal(tensor, stored)
        else:
            assert torch.equal(tensor, stored), name
    assert json.loads((merged / "config.json").read_text())["dtype"] == dtype


def test_what_cannot_be_read(
    model: Path, data: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    checkpoint = train(tmp_path / "output", model, make_config)
    full = train(tmp_path / "full", model, make_config, method="full")
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint, moved)
    (moved / "run.json").unlink()
    tree = json.loads((moved / "adapter_config.json").read_text())

    def adapter(**changes: object) -> Path:
        (moved / "adapter_config.json").write_text(json.dumps({**tree, **changes}))
        return moved

    for attempt, message in (
        (lambda: load_trained(tmp_path / "none"), "no such folder"),
        (lambda: load_trained(empty), "no intact checkpoint"),
        (lambda: load_trained(adapter(base_model_name_or_path="/gone")), "/gone: no such model"),
        (lambda: merge_adapter(open_adapter(full)[0], tmp_path / "new"), "there is no adapter"),
        (lambda: merge_adapter(open_adapter(checkpoint)[0], empty.parent), "exists already"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    moved_base = load_trained(adapter(base_model_name_or_path="/gone"), base=str(model)).weights
    assert moved_base is not None
    kept = load_trained(checkpoint).weights
    assert kept is not None
    assert np.array_equal(moved_base, kept)


def test_what_was_not_held_out_cannot_be_scored(
    model: Path, data: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    checkpoint = train(tmp_path / "output", model, make_config, data__validation_fraction=0.1)
    whole = train(tmp_path / "whole", model, make_config)
    adapter = tmp_path / "adapter"
    shutil.copytree(checkpoint, adapter)
    (adapter / "run.json").unlink()
    for folder, message in (
        (whole, f"{whole}: its run has no held-out part"),
        (adapter, f"{adapter}: is not a checkpoint"),
        (checkpoint, f"{data}: is not the file that the run was trained on"),
    ):
        arguments = [str(folder), "--data", str(data), "--held-out"]
        done = click.testing.CliRunner().invoke(evaluate, arguments)
        assert isinstance(done.exception, InputError)
        assert str(done.exception).startswith(message)
        assert "\n" not in str(done.exception)
    done = click.testing.CliRunner().invoke(evaluate, ["--watch", "output", "--held-out"])
    assert done.exit_code == 2
    assert "--held-out" in done.output


def test_scores_as_json_hold_no_nan() -> None:
    tree = EvaluationScores("causal-lm", 1, 3, float("nan"), perplexity=float("nan")).as_json()
    assert json.loads(json.dumps(tree, allow_nan=False))["loss"] is None
    tree = EvaluationScores("classify", 3, 3, 0.5, 0.5, 0.1, [[1, 1], [0, 1]]).as_json()
    assert tree["classes"][0] == {"label": 0, "count": 2, "precision": 1.0, "recall": 0.5}
    assert "perplexity" not in tree


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_data_is_evaluated_by_its_names_of_keys(
    model: Path, data: Path, tmp_path: Path, make_config: MakeConfig, suffix: str
) -> None:
    """Those of the run, those that are given, or ours, whichever the data has."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    table = tmp_path / f"intents.{suffix}"
    if suffix == "csv":
        with table.open("w") as file:
            writer = csv.writer(file)
            writer.writerows([("kind", "body"), *((row["label"], row["input"]) for row in rows)])
    else:
        pa = pytest.importorskip("pyarrow")
        columns = {"body": [row["input"] for row in rows], "kind": [row["label"] for row in rows]}
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), table)
    mapped = {"input": "body", "label": "kind"}
    train(tmp_path / "run", model, make_config, data__columns=mapped)
    train(tmp_path / "plain", model, make_config)

    def evaluated(name: str, file: Path, *more: str) -> dict[str, Any]:
        words = [str(tmp_path / name), "--data", str(file), "--json", "--gpu-backend", "cpu"]
        done = click.testing.CliRunner().invoke(evaluate, [*words, *more])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    expected = evaluated("plain", data)
    given = ("--column", "input=body", "--column", "label=kind")
    assert evaluated("run", table) == expected
    assert evaluated("run", data) == expected
    assert evaluated("plain", table, *given) == expected
    refused = click.testing.CliRunner().invoke(
        evaluate, [str(tmp_path / "plain"), "--data", str(table), "--column", "input=bdy"]
    )
    assert "no key 'bdy' (data.columns.input); it has" in str(refused.exception)


def test_columns_are_of_data_that_is_given() -> None:
    for words, says in (
        (["out", "--data", "d", "--held-out"], "--held-out reads --data as its run did"),
        (["--watch", "out", "--tasks", "code"], "--column names keys of --data and --prompts"),
    ):
        done = click.testing.CliRunner().invoke(evaluate, [*words, "--column", "text=body"])
        assert done.exit_code == 2
        assert says in done.output
