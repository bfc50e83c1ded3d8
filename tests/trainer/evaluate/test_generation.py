"""A trained model continues texts and conversations, the same on every backend."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click.testing
import numpy as np
import pytest
import torch

from tests.covering import covering
from tests.trainer import small_model as small
from tests.trainer.saved_run import Run
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.generate import generate
from trainer.data.shapes import Sample
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.evaluate.generation import TextModel, complete_samples
from trainer.init_model import init_model
from trainer.model.initialization import draw_uniform, initial_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import TrainState
from trainer.planning.forward import ForwardSize, plan_forward, used_setup
from trainer.planning.model_config import read_shape
from trainer.planning.replica import USABLE
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.run.distributed.inference import Ranks
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def write_adapter(output: Path, model: Path, make_config: MakeConfig, **settings: Any) -> Path:
    """Return an output folder whose adapter is far from nothing."""
    config = make_config(model, task="causal-lm", data__max_seq_len=24, **settings)
    layout = build_layout(model, config)
    weights = initial_weights(layout, model, config)
    for slot in layout.iter_tensors():
        if slot.name.endswith("lora_B.weight"):
            weights[slot.start : slot.stop] = draw_uniform(3, slot.name, slot.size, 0.5)
    zeros = np.zeros_like(weights)
    state = TrainState(weights, zeros, zeros.copy(), step=4)
    store = CheckpointStore(output / "checkpoints", layout, config, model)
    progress = RunProgress("run", 4, 0, 8, 0, 0, config.model_dump(mode="json"))
    store.save(state.take_snapshot(), progress, metric=0.5)
    return output


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Path, make_config: MakeConfig) -> Path:
    return write_adapter(tmp_path_factory.mktemp("output"), model, make_config)


@pytest.fixture(scope="module")
def nf4_adapter(
    tmp_path_factory: pytest.TempPathFactory, data: Path, make_config: MakeConfig
) -> Path:
    """Return the same on a base of four bits a weight.

    Its matrices are whole blocks of 64 wide: others bitsandbytes misreads on the CPU.
    """
    folder = tmp_path_factory.mktemp("nf4")
    sizes = replace(small.SIZES, hidden_size=64, head_dim=16)
    base = init_model(data, folder / "model", sizes, 0)
    return write_adapter(folder / "output", base, make_config, model__quantization="nf4")


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Return the model as most are published: in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "bf16"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def bf16_adapter(
    tmp_path_factory: pytest.TempPathFactory, bf16_model: Path, make_config: MakeConfig
) -> Path:
    return write_adapter(tmp_path_factory.mktemp("bf16"), bf16_model, make_config)


@pytest.fixture(scope="module")
def tested_once() -> Iterator[None]:
    """Test the Vulkan device when it is opened first, and not again: ten openings follow."""
    from trainer.replica.wgpu import selftest
    from trainer.replica.wgpu.gpu.device import Device

    real, passed = selftest.verify_device, []

    def check(device: Device) -> None:
        if not passed:
            real(device)
            passed.append(device.adapter.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "verify_device", check)
        yield
    assert passed


def invoke(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(generate, [str(argument) for argument in arguments])


def objects(result: click.testing.Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "trained", ["adapter", "nf4_adapter", "bf16_adapter", "model", "bf16_model"]
)
@pytest.mark.usefixtures("vulkan", "tested_once")
def test_backends_print_the_same(
    request: pytest.FixtureRequest, tmp_path: Path, trained: str
) -> None:
    """Greedy and drawn; the prompts lie in a file, one is a conversation."""
    folder = request.getfixturevalue(trained)
    lines: list[dict[str, Any]] = [
        {"text": "mkdir -p build && echo hello"},
        {"messages": [{"role": "user", "content": "echo"}]},
        {"input": "rm", "label": 1},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for drawing in ([], ["--temperature", 1.5, "--top-k", 40, "--top-p", 0.9, "--seed", 6]):
        command = [folder, "--data", file, "--max-new-tokens", 5, "--json", *drawing]
        found: list[list[dict[str, Any]]] = []
        for backend in ("cpu", "wgpu"):
            result = invoke(*command, "--gpu-backend", backend, "--threads", 1)
            found.append(objects(result))
            assert f" on {backend}" in result.stderr
        assert found[0] == found[1]
        assert [one["schema"] for one in found[0]] == ["motley.completion/1"] * 3
        assert [one["prompt"] for one in found[0]] == [
            "mkdir -p build && echo hello",
            "<|im_start|>user\necho<|im_end|>\n<|im_start|>assistant\n",
            "rm",
        ]
        assert all(one["ended"] or one["tokens"] == 5 for one in found[0])


def test_the_text_alone_is_printed_for_people(model: Path) -> None:
    arguments = (model, "--max-new-tokens", 4, "--gpu-backend", "cpu")
    (one,) = objects(invoke(*arguments, "--prompt", "echo hello", "--json"))
    result = invoke(*arguments, "--prompt", "echo hello", "--prompt", "rm")
    assert result.stdout.startswith(one["text"] + "\n")


def test_a_stop_token_ends_a_text_on_the_cpu(adapter: Path, model: Path) -> None:
    """In a batch, whose other samples go on and leave padding behind it."""
    from trainer.replica.torch.generator import load_generator

    trained = load_trained(adapter)
    prompts = [[70, 80, 90, 100], [75], [110, 120]]

    def run(stop: set[int], batch: int) -> list[list[int]]:
        generator = load_generator(
            trained.base_dir, trained.config, trained.layout, trained.weights, "cpu", 1, batch=batch
        )
        return generator.generate(
            prompts, max_new_tokens=6, sampling=Sampling(), stop=frozenset(stop)
        )

    free = run(set(), 3)
    assert [len(tokens) for tokens in free] == [6, 6, 6]
    assert run(set(), 2) == free
    stop = free[1][2]
    assert run({stop}, 3) == [
        tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in free
    ]


ATTENTION = ["q_proj", "v_proj"]
"""Resident experts with adapters are one product with W + B A, which has other bits."""
USES = [
    use
    for backend, families in (("cpu", ("qwen3", *small.DEEP_FAMILIES)), ("wgpu", ("qwen3",)))
    for use in covering(
        (backend, family, kind, resident)
        for family in families
        for kind in ("full", "full in nf4", "lora", "nf4")
        for resident in (0, 4)
    )
]


@pytest.mark.parametrize(("backend", "family", "kind", "resident"), USES)
def test_answers_are_those_of_the_resident_model(
    request: pytest.FixtureRequest,
    deep_model: Path,
    tmp_path: Path,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    family: str,
    kind: str,
    resident: int,
) -> None:
    if backend == "wgpu":
        request.getfixturevalue("vulkan")
    caplog.set_level("INFO")
    folder = deep_model
    if family != "qwen3":
        folder = small.write_family(
            tmp_path / "model", deep_model, family, **small.DEEP_FAMILIES[family]
        )
    if not kind.startswith("full"):
        settings: dict[str, Any] = {"model__quantization": "nf4"} if kind == "nf4" else {}
        settings["lora__target_modules"] = ATTENTION
        folder = write_adapter(tmp_path / "out", folder, make_config, **settings)
    command = [folder, "--prompt", "echo hello", "--prompt", "rm", "--max-new-tokens", 5, "--json"]
    command += ["--gpu-backend", backend, "--threads", 1, "--temperature", 1]
    command += ["--quantization", "nf4"] if kind == "full in nf4" else []
    whole = objects(invoke(*command, "--resident", "all"))
    assert "stay in memory" not in caplog.text
    assert objects(invoke(*command, "--resident", resident)) == whole
    line = rf"{backend}(:0)?: {resident} of 6 layers stay in memory, {6 - resident} are read from"
    assert re.search(line, caplog.text)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_memory_decides_which_layers_stay_and_how_many_prompts_are_continued_at_once(
    deep_model: Path,
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    from trainer.replica.torch import residence

    full = kind == "full"
    trained = load_trained(deep_model if full else write_adapter(tmp_path, deep_model, make_config))
    config = trained.config.with_settings({"data.max_seq_len": 24})
    shape, length = read_shape(deep_model), 24
    setup = used_setup(config, trained.layout.size, accelerator=False)

    def need(resident: int | None, rows: int) -> int:
        size = ForwardSize(rows * length, length, rows * length)
        return plan_forward(shape, setup, size, resident, accelerator=False).total

    def choose(free: float) -> tuple[int | None, int]:
        monkeypatch.setattr(residence, "available_bytes", lambda _: math.ceil(free / USABLE) + 1)
        place = trained.base_dir, config, trained.layout, torch.device("cpu")
        return residence.plan_generation(*place, 2)

    assert choose(need(None, 2)) == (None, 2)
    assert choose(need(None, 1)) == (None, 1), "a prompt fits with all layers"
    assert need(2, 2) < need(None, 1)
    assert choose(need(2, 2)) == (2, 2)
    assert choose(need(0, 1)) == (0, 1)
    with pytest.raises(InputError, match=rf"to {length} tokens, .* may be used; ask for fewer"):
        choose(need(0, 1) * 0.99)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--parallel", "tensor=2"], "only one process; start"),
        (["--quantization", "int8"], "'int8' is not one of"),
        (["--resident", "many"], "neither auto nor all nor a number of layers"),
    ],
)
def test_what_keeps_all_layers_refuses_a_number(model: Path, more: list[str], why: str) -> None:
    result = invoke(model, "--prompt", "x", "--resident", 1, *more)
    assert result.exit_code
    assert why in (str(result.exception) + result.output)


def test_processes_that_share_a_model_refuse_another_format() -> None:
    with pytest.raises(InputError, match=r"^--quantization nf4: with --parallel each process"):
        Ranks("tensor=2", Compute(quantization="nf4"), {"RANK": "0"})


def test_a_file_that_is_cut_ends_an_answer_with_one_line(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    trained = load_trained(folder)
    text = TextModel(trained)
    sample = Sample("echo hello")
    (prompt,) = text.encode([sample])
    text.open_generator(len(prompt), 4, Compute("cpu", threads=1, resident=0))
    path = folder / "model.safetensors"
    os.truncate(path, 4096)
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: layer \d .*trunc") as caught:
        text.complete_prompts([sample], [prompt], 4, Sampling())
    assert "\n" not in str(caught.value)


def test_what_cannot_be_continued(model: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    trained = load_trained(model)
    with pytest.raises(InputError, match="prompt 2: has no token to continue"):
        complete_samples(trained, [Sample("x"), Sample("")], 4, Sampling(), Compute("cpu"))
    classifier = make_config(model, num_classes=3)
    refused = type(trained)(model, classifier, model, trained.layout, trained.weights)
    with pytest.raises(InputError, match="is a classifier, only language models generate"):
        complete_samples(refused, [Sample("x")], 4, Sampling(), Compute("cpu"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save(str(broken / "tokenizer.json"))
    with pytest.raises(InputError, match=r"gives token \d+ of prompt 1, the model has"):
        complete_samples(load_trained(broken), [Sample("zzz")], 4, Sampling(), Compute("cpu"))
    (broken / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json: not valid JSON"):
        complete_samples(load_trained(broken), [Sample("x")], 4, Sampling(), Compute("cpu"))
    for arguments in ([model], [model, "--prompt", "x", "--data", "y"]):
        assert "give --prompt TEXT, --chat TEXT or --data FILE" in invoke(*arguments).output


def test_prompts_are_read_by_their_names_of_keys(
    tmp_path: Path, model: Path, make_config: MakeConfig
) -> None:
    """Those that are given, or those of the model's run if the file has them."""
    run = Run(tmp_path / "run", model, make_config, data__columns={"text": "body"})
    run.save(1)
    for key in ("text", "body", "q"):
        (tmp_path / f"{key}.jsonl").write_text(json.dumps({key: "echo hello"}) + "\n")
    options = ("--max-new-tokens", 4, "--gpu-backend", "cpu", "--json", "--data")
    expected = objects(invoke(run.output, *options, tmp_path / "text.jsonl"))
    assert objects(invoke(run.output, *options, tmp_path / "body.jsonl")) == expected
    given = (tmp_path / "q.jsonl", "--column", "text=q")
    assert objects(invoke(run.output, *options, *given)) == expected
    alone = invoke(run.output, "--prompt", "a", "--column", "text=q")
    assert "--column names keys of --data FILE" in alone.output
