"""Answers with keys and values on a Vulkan device are those without, also once it is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.trainer.replica.torch.parallel.models import write_drawn_model
from tests.trainer.small_teacher import write_corpus, write_teacher
from trainer.commands.distill.generate import generate
from trainer.distill.answers.folder import AnswersFolder
from trainer.planning.vulkan_buffers import KVShape
from trainer.replica.sampling import Logits, Sampling
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import TinyModel
    from trainer.replica.torch.generator import TorchGenerator
    from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter

PROMPTS = [[7, 8, 9, 10, 11, 12], [75], [110, 120, 130]]
SHAPE = KVShape(4, 2, 32)
"""Of `write_drawn_model`."""


@dataclass(frozen=True)
class Seen(Sampling):
    """Keeps the logits that it chooses by."""

    logits: list[Logits] = field(default_factory=list[Logits], compare=False)

    def choose_tokens(self, logits: Logits, samples: Sequence[int], place: int) -> Any:
        """See `Sampling.choose`."""
        self.logits.append(logits.copy())
        return super().choose_tokens(logits, samples, place)


def generator_for(folder: Path, dtype: str = "float32") -> TorchGenerator:
    import torch

    from trainer.config.run import load_config
    from trainer.distill.teacher.torch_engine import TorchEngine
    from trainer.replica.torch.generator import make_generator

    engine = TorchEngine(folder, getattr(torch, dtype))
    config = load_config(
        None,
        {
            "task": "causal-lm",
            "method": "full",
            "model.path": str(folder),
            "data.train": "none",
            "training.precision": "fp32",
        },
    )
    return make_generator(engine.model, folder, config, engine.device, batch=2)


def written(generator: TorchGenerator, new: int = 8) -> tuple[list[list[int]], list[Logits]]:
    sampling = Seen()
    made = generator.generate(PROMPTS, max_new_tokens=new, sampling=sampling)
    return made, sampling.logits


def compare_with_a_store(
    generator: TorchGenerator, adapter: Adapter, shape: KVShape, layers: Sequence[int]
) -> None:
    from trainer.replica.wgpu.generation.kv_store import KVStore
    from trainer.replica.wgpu.gpu.device import Device

    tokens, logits = written(generator)
    device = Device(adapter)
    generator.store = KVStore(device, shape, layers)
    found, with_store = written(generator)
    assert found == tokens
    for ours, theirs in zip(with_store, logits, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    steps = 7 * -(-len(PROMPTS) // generator.batch)  # each token after the first of each batch
    assert device.counters.readbacks == steps * len(layers)


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_without(
    tmp_path: Path, vulkan: Adapter, family: str, layers: list[int]
) -> None:
    """Queries share keys; prompts differ in length."""
    folder = write_drawn_model(tmp_path / "model", family)
    compare_with_a_store(generator_for(folder), vulkan, SHAPE, layers)


@pytest.mark.parametrize(
    ("family", "storable"),
    [("mixtral", [0, 1]), ("granite", [0, 1]), ("gemma3_text", [1]), ("qwen3_5_text", [1])],
)
def test_layers_of_transformers_that_attend_to_everything(
    tiny_model: TinyModel, vulkan: Adapter, family: str, storable: list[int]
) -> None:
    """Experts, a scale of its own, a sliding window and a recurrent layer beside them."""
    from trainer.replica.torch.model import find_backbone
    from trainer.replica.torch.published_cache import storable_layers

    generator = generator_for(tiny_model(family))
    shape, layers = storable_layers(find_backbone(generator._model))
    assert layers == storable
    assert shape is not None
    compare_with_a_store(generator, vulkan, shape, layers)
    generator.store = None
    assert written(generator)[0], "without the store again"


@pytest.mark.usefixtures("vulkan")
def test_attention_with_sinks_stays_where_it_is(tiny_model: TinyModel) -> None:
    from trainer.distill.teacher.kv_offload import KVOffload
    from trainer.distill.teacher.torch_author import open_generate
    from trainer.replica.backend import Compute

    with pytest.raises(InputError, match="attend to all tokens by scaled dot products alone"):
        open_generate(
            tiny_model("gpt_oss"),
            "float32",
            Compute("cpu"),
            2,
            9,
            KVOffload("0", answers=2, slots=9),
        )


def test_a_device_that_is_lost_costs_a_line_and_no_token(
    tmp_path: Path, vulkan: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    from trainer.distill.teacher.kv_offload import with_fallback
    from trainer.replica.wgpu.generation.kv_store import KVStore
    from trainer.replica.wgpu.gpu.device import Device

    generator = generator_for(write_drawn_model(tmp_path / "model", "qwen3"))
    whole, _ = written(generator)
    device = Device(vulkan)
    generator.store = KVStore(device, SHAPE, [0, 1])

    def lose(row: int, tokens: Sequence[int]) -> bool:
        if len(tokens) == 3 and generator.store is not None:
            device.handle.destroy()
        return False

    write = with_fallback(generator, 1)
    assert write(PROMPTS, max_new_tokens=8, sampling=Sampling(), until=lose) == whole
    assert (generator.store, generator.batch) == (None, 1), "as many as fit beside the model"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "keys and values are on cpu from here on" in line
    assert write(PROMPTS, max_new_tokens=8, sampling=Sampling()) == whole


def test_the_command_refuses_a_slower_device_unless_told_otherwise(
    tmp_path: Path, vulkan: Adapter
) -> None:
    """No device attends to two short rows in less time than two transfers take."""
    model = write_teacher(tmp_path / "model", write_corpus(tmp_path / "texts.jsonl"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("def f1", "x")))
    words = [str(model), "--prompts", str(prompts), "--max-new-tokens", "4", "--temperature", "0"]
    words += ["--gpu-backend", "cpu", "--threads", "1", "--dtype", "float32"]
    there = ["--kv-offload", f"wgpu:{vulkan.index}"]

    def run(name: str, *more: str) -> Any:
        return CliRunner().invoke(generate, [*words, "--out", str(tmp_path / name), *more])

    refused = run("refused", *there)
    assert isinstance(refused.exception, InputError), refused.output
    assert "is refused because it is slower: a layer's attention takes " in str(refused.exception)
    assert "force it with --kv-even-if-slower" in str(refused.exception)
    assert not (tmp_path / "refused" / "shard-00000").exists()

    assert run("plain").exit_code == 0
    done = run("stored", *there, "--kv-even-if-slower", "--kv-layers", "1")
    assert done.exit_code == 0, done.exception
    plain, stored = (AnswersFolder(tmp_path / name).read_shard(0) for name in ("plain", "stored"))
    assert [each.tokens.tolist() for each in stored] == [each.tokens.tolist() for each in plain]


def test_options_that_cannot_be_meant(tmp_path: Path) -> None:
    words = ["model", "--prompts", "none.jsonl", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(generate, [*words, "--kv-layers", "2"])
    assert "need --kv-offload" in str(done.exception)
    done = CliRunner().invoke(generate, [*words, "--kv-offload", "cuda:0"])
    assert done.exit_code == 2
    assert "expected wgpu or wgpu:ID" in done.output


def test_layers_without_room_are_refused(vulkan: Adapter) -> None:
    import torch

    from trainer.distill.teacher.kv_offload import KVOffload, open_device, open_store

    wanted = KVOffload(str(vulkan.index), answers=8, slots=1 << 32, layers=2)
    with pytest.raises(InputError, match="keys and values of 0 of 4 layers fit, for 8 answers"):
        open_store(wanted, open_device(wanted), SHAPE, range(4), 8, torch.zeros(1))


def test_a_lost_device_whose_keys_and_values_fit_nowhere_ends_in_one_line(
    tmp_path: Path, vulkan: Adapter
) -> None:
    from trainer.distill.teacher.kv_offload import with_fallback
    from trainer.replica.wgpu.generation.kv_store import KVStore
    from trainer.replica.wgpu.gpu.device import Device

    generator = generator_for(write_drawn_model(tmp_path / "model", "qwen3"))
    device = Device(vulkan)
    generator.store = KVStore(device, SHAPE, [0, 1])
    device.handle.destroy()
    with pytest.raises(InputError, match="do not fit cpu: start again, or ask for fewer tokens"):
        with_fallback(generator, 0)(PROMPTS, max_new_tokens=8, sampling=Sampling())


@pytest.mark.parametrize("elsewhere", [0, 1, 2])
def test_keys_and_values_on_another_device_leave_memory_for_more_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: int
) -> None:
    import torch

    from trainer.planning.forward import ForwardSize, frozen_setup, plan_forward
    from trainer.planning.model_config import read_shape
    from trainer.planning.replica import USABLE
    from trainer.replica.torch import residence

    folder = write_drawn_model(tmp_path / "model", "qwen3")
    shape, setup, length = read_shape(folder), frozen_setup(4), 64

    def need(rows: int, stored: int) -> int:
        size = ForwardSize(rows * length, length, rows * length, stored)
        return plan_forward(shape, setup, size, None, accelerator=False).total

    free = math.ceil(need(32, 2) / USABLE) + 1
    monkeypatch.setattr(residence, "available_bytes", lambda _: free)
    terms = folder, setup, "all", length, torch.device("cpu"), 99
    found = residence.plan_answers(*terms, elsewhere)
    assert need(found.batch, elsewhere) <= need(32, 2) < need(found.batch + 1, elsewhere)
    assert found.batch_alone == residence.plan_answers(*terms).batch
    assert (found.batch > found.batch_alone) == bool(elsewhere)
