"""Layers that are read at each use compute what resident ones do, bit for bit."""

from __future__ import annotations

import gc
import os
import re
import shutil
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.covering import covering
from tests.trainer.replica.driving import drawn_weights, gradient, start, taught, train
from tests.trainer.replica.kept_tensors import kept_bytes
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.planning.model_config import read_shape
from trainer.planning.replica import MemoryPlan, choose_streamed, plan_memory
from trainer.replica.sampling import Sampling
from trainer.replica.torch import loader, objective
from trainer.replica.torch import replica as torch_replica
from trainer.replica.torch.generator import load_generator
from trainer.replica.torch.streaming import (
    LayerStream,
    StreamedEmbedding,
    StreamedLinear,
)
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.trainer.tiny import Tiny
    from trainer.replica.torch.generator import TorchGenerator
    from trainer.replica.torch.replica import TorchReplica

LAYERS = 4
TASKS: dict[str, dict[str, Any]] = {
    "classify": {},
    "causal-lm": {"task": "causal-lm"},
    "dpo": {"task": "dpo"},
    "distillation": {"task": "causal-lm", "distillation": {"alpha": 0.5}},
    "freeze-a": {"task": "causal-lm", "lora__freeze_a": True},
    "packed": {"task": "causal-lm", "training__pack": True, "data__max_seq_len": 64},
    "some-layers": {"task": "causal-lm", "lora__layers_to_transform": [1, 3]},
}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("float32", {}),
    "bf16": ("bfloat16", {"model__dtype": "bfloat16"}),
    "bf16 file as fp32": ("bfloat16", {}),
    "fp32 file as bf16": ("float32", {"model__dtype": "bfloat16"}),
    "fp32 in bf16 products": ("float32", {"training__precision": "bf16"}),
    "nf4": ("float32", {"model__quantization": "nf4"}),
    "nf4 of bf16": ("bfloat16", {"model__quantization": "nf4", "model__dtype": "bfloat16"}),
    "nf4 in bf16 products": (
        "float32",
        {"model__quantization": "nf4", "training__precision": "bf16"},
    ),
}
CASES = [
    *(("qwen3", task, "fp32", 0) for task in TASKS),
    *(("qwen2", "causal-lm", form, 1) for form in FORMATS),
    ("qwen3", "dpo", "bf16", 2),
    ("llama", "distillation", "fp32 in bf16 products", 3),
    ("qwen3", "dpo", "nf4", 0),
    ("llama", "classify", "nf4 of bf16", 2),
]
GROUPS = {"all": 1 << 30, "two": 2 * 2 * 40, "one": 0}
"""Most tokens of a group; a micro-batch has at most two rows of 40 tokens, of a pair four of 60."""
WAYS = covering(
    (*case, recompute, group) for case in CASES for recompute in (True, False) for group in GROUPS
)


def feed_of(replica: TorchReplica | TorchGenerator) -> Any:
    model: Any = replica._model
    found = {part._stream for part in model.modules() if isinstance(part, StreamedLinear)}
    (stream,) = found
    assert isinstance(stream, LayerStream)
    return stream.feed


@pytest.mark.parametrize(("family", "task", "form", "resident", "recompute", "group"), WAYS)
def test_losses_gradients_and_weights_are_those_of_the_resident_run(
    tiny: Tiny, family: str, task: str, form: str, resident: int, recompute: bool, group: str
) -> None:
    """The resident run has three micro-batches, one after the other."""
    dtype, stored = FORMATS[form]
    folder = tiny.model(family, dtype=dtype, num_hidden_layers=LAYERS)
    settings: dict[str, Any] = TASKS[task] | stored
    settings |= {"training__gradient_checkpointing": recompute}
    settings |= {"training__micro_batch_size": 2, "lora__lora_rank": 4}
    batch = tiny.batch(5, settings.get("task", "classify"))
    batch = taught(batch) if task == "distillation" else batch
    whole = train(*tiny.start(folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.start(folder, **settings, model__resident=resident)
    replica.split.group_tokens = GROUPS[group]
    assert train(replica, weights, batch) == whole
    feed = feed_of(replica)
    assert feed.slot_bytes == 2 * feed._weights.span_bytes
    assert len(feed._weights.layers) == LAYERS - resident


def test_pairs_are_compared_with_adapters_of_before_and_answers_of_its_own_learn(
    tiny: Tiny,
) -> None:
    """The reference has weights of its own; a student's step has a second part of micro-batches."""
    folder = tiny.model(num_hidden_layers=LAYERS)
    settings: dict[str, Any] = {"training__micro_batch_size": 2, "lora__lora_rank": 4}
    found: dict[Any, list[Any]] = {}
    for resident in ("all", 0):
        own: dict[str, Any] = settings | {"model__resident": resident}
        config = tiny.config(folder, task="dpo", **own)
        before = drawn_weights(folder, config) * np.float32(0.5)
        pairs = train(*start(folder, config, reference=before), tiny.batch(5, "dpo"))
        more: Any = {"alpha": 0.5, "on_policy": {"prompts": "none"}}
        student, _ = tiny.start(folder, task="causal-lm", distillation=more, **own)
        batch, answers = (taught(tiny.batch(5, "causal-lm", seed)) for seed in (0, 1))
        results = student.accumulate_with(batch, None, answers)
        sums = [(each.loss_sum, each.ce_sum, each.kl_sum) for each in results]
        found[resident] = [pairs, sums, student.gradient.numpy().tobytes()]
    assert found[0] == found["all"]


def test_a_start_quantises_no_layer_of_a_streamed_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stay come from the file, too; their bits are `WAYS`'s."""
    folder = tiny.model(num_hidden_layers=LAYERS)
    settings: dict[str, Any] = {"task": "causal-lm", "model__quantization": "nf4"}
    batch = tiny.batch(2, "causal-lm")
    whole = train(*tiny.start(folder, **settings), batch)
    monkeypatch.setattr(loader, "nf4_linear", lambda *_: pytest.fail("quantised again"))
    assert train(*tiny.start(folder, **settings, model__resident=2), batch) == whole


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_answers_are_those_of_the_resident_model(tiny: Tiny, quantization: str) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    prompts = [[5, 6, 7], [8]]
    settings: dict[str, Any] = {"task": "causal-lm", "lora__lora_rank": 4}
    settings["model__quantization"] = quantization
    resident, weights = tiny.start(folder, **settings)
    streamed, _ = tiny.start(folder, **settings, model__resident=0)
    found = [each.answer(prompts, 6, frozenset()) for each in (resident, streamed)]
    assert found[0] == found[1]
    # As `trainer generate` and `chat` open what was trained.
    config = tiny.config(folder, **settings, model__resident=0)
    made = load_generator(folder, config, build_layout(folder, config), weights, threads=1)
    answers = made.generate(prompts, max_new_tokens=6, sampling=Sampling(), stop=frozenset())
    assert answers == found[0]
    assert feed_of(made).reads


def test_no_layer_is_read_twice_in_one_direction(tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    replica, _ = tiny.start(folder, task="causal-lm", model__resident=0)
    batch = tiny.batch(2, "causal-lm")
    gradient(replica, batch)
    first = feed_of(replica).reads
    gradient(replica, batch)
    # At each turn both slots still have the layers that are needed first.
    assert first == LAYERS + LAYERS - 2
    assert feed_of(replica).reads - first == 2 * (LAYERS - 2)


def count_reads(replica: TorchReplica, batch: Sequence[Any]) -> tuple[int, int]:
    """Return the reads of a step's layers, and those before its first block of gradients left."""
    feed, sent = feed_of(replica), list[int]()
    before = feed.reads
    replica.forward_backward(batch, lambda *_: sent.append(feed.reads - before))
    return feed.reads - before, sent[0]


@pytest.mark.parametrize("task", ["causal-lm", "dpo"])
def test_a_group_reads_a_layer_once_in_each_direction(tiny: Tiny, task: str) -> None:
    """And blocks of gradients leave at their layer's turn, in the first half of backward, too."""
    folder = tiny.model(num_hidden_layers=2 * LAYERS)
    replica, _ = tiny.start(folder, task=task, model__resident=0, training__micro_batch_size=2)
    batch, kept = tiny.batch(6, task), replica.split.group_tokens
    reads: dict[int, int] = {}
    replica.forward_backward(batch, lambda *_: None)
    for tokens in (kept, 0):
        replica.split.group_tokens = tokens
        reads[tokens], first_left = count_reads(replica, batch)
        assert first_left < reads[tokens] - LAYERS
    # At each turn both slots still have the layers that are needed first.
    forward_of_reference = 2 * LAYERS if task == "dpo" else 0
    assert reads[kept] == 2 * (2 * LAYERS - 2) + forward_of_reference
    assert reads[0] == 3 * reads[kept]


@pytest.mark.parametrize("layers", [3, 5])
def test_what_waits_in_a_group_is_planned(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """At the first loss: inputs of layers, and what the last one returned."""
    folder = tiny.model(num_hidden_layers=layers)
    settings: dict[str, Any] = {"task": "causal-lm", "training__gradient_checkpointing": True}
    settings |= {"training__micro_batch_size": 2}
    replica, _ = tiny.start(folder, **settings, model__resident=0)
    sample = tiny.batch(1, "causal-lm")[0]
    found: list[int] = []
    computed = objective.language_loss

    def count_first(model: Any, micro: Any, *given: Any, **more: Any) -> Any:
        hidden = {
            each.untyped_storage().data_ptr(): each.nbytes
            for each in gc.get_objects()
            if type(each) is torch.Tensor and each.shape == micro.hidden.shape
        }
        found.append(sum(hidden.values()))
        return computed(model, micro, *given, **more)

    monkeypatch.setattr(objective, "language_loss", count_first)
    for samples in (2, 8):
        gradient(replica, [sample] * samples)
    alone, group = found[0], found[1]
    waiting = 6 * len(sample.input_ids)
    assert group - alone == waiting * replica._plan.per_waiting_token


def test_memory_is_for_a_group_before_it_is_for_layers(tiny: Tiny) -> None:
    """With a batch of one sample six layers stay; with four a step reads less with fewer."""
    layers = 12
    folder = tiny.model(num_hidden_layers=layers)
    kept: dict[int, int | None] = {}
    for samples in (1, 4):
        own = {"training__batch_size": samples, "data__max_seq_len": 16}
        config = tiny.config(folder, task="causal-lm", **own)
        layout = build_layout(folder, config)

        def plan(resident: int | None, config: Any = config, layout: Any = layout) -> MemoryPlan:
            return plan_memory(
                *(read_shape(folder), read_headers(folder), layout, config),
                accelerator=False,
                recompute=True,
                resident=resident,
            )

        usable = (plan(6).least + plan(7).least) // 2
        found = choose_streamed(plan, layers, config, usable)
        kept[samples] = found.resident
        assert found.least + 16 * (samples - 1) * found.per_waiting_token <= usable
    assert kept[1] == 6
    assert kept[4] is not None
    assert kept[4] < 6


def test_backward_keeps_no_streamed_weight(tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    kept: dict[Any, int] = {}
    for resident in (0, "all"):
        replica, _ = tiny.start(folder, task="causal-lm", model__resident=resident)
        model: Any = replica._model
        ids = torch.tensor([[1, 2, 3]])
        kept[resident] = kept_bytes(lambda model=model, ids=ids: model.model(ids))
    linears = feed_of(tiny.start(folder, task="causal-lm", model__resident=0)[0])
    assert kept["all"] - kept[0] > LAYERS * linears._weights.span_bytes / 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_that_is_cut_ends_the_step_with_one_line(
    tiny: Tiny, tmp_path: Path, tied: bool
) -> None:
    """Nothing of a streamed model is mapped: no page of a table is gone with the file."""
    folder = tmp_path / "model"
    made = tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    shutil.copytree(made, folder)
    replica, _ = tiny.start(folder, task="causal-lm", model__resident=1)
    batch = tiny.batch(2, "causal-lm")
    gradient(replica, batch)
    path = folder / "model.safetensors"
    os.truncate(path, 4096)
    part = r"layer \d" if tied else r"model\.embed_tokens\.weight"
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: {part} .*trunc") as caught:
        gradient(replica, batch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tied", "settings", "reads_rows"),
    [
        (True, {"task": "causal-lm"}, False),
        (False, {"task": "causal-lm"}, True),
        (True, {}, True),
        (False, {"task": "causal-lm", "lora__modules_to_save": ["embed_tokens"]}, False),
    ],
)
def test_rows_of_tables_are_read_unless_all_of_them_are_needed(
    tiny: Tiny, tied: bool, settings: dict[str, Any], reads_rows: bool
) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    batch = tiny.batch(5, settings.get("task", "classify"))
    whole = train(*tiny.start(folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.start(folder, **settings, model__resident=0)
    assert train(replica, weights, batch) == whole
    model: Any = replica._model
    assert isinstance(model.model.embed_tokens, StreamedEmbedding) == reads_rows
    kept = [each for each in model.parameters() if not each.requires_grad]
    assert replica._plan.frozen == sum(each.nbytes for each in kept)


def test_memory_decides_how_many_layers_stay(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tiny.model(num_hidden_layers=LAYERS)
    settings: dict[str, Any] = {"task": "causal-lm", "data__max_seq_len": 64}
    settings["training__batch_size"] = 1
    whole, _ = tiny.start(folder, **settings)
    batch = tiny.batch(2, "causal-lm")
    least, found = whole._plan.least, gradient(whole, batch)[0]
    assert whole._plan.resident is None
    layer = feed_of(tiny.start(folder, **settings, model__resident=0)[0]).slot_bytes // 2
    gives_back = "freed memory goes back at once"
    assert gives_back not in caplog.text, "a setting alone makes no memory short"
    kept: list[int | None] = []
    for part in count():
        caplog.clear()
        free = round(least / 0.9) - part * layer
        monkeypatch.setattr(torch_replica, "available_bytes", lambda _, free=free: free)
        try:
            replica, _ = tiny.start(folder, **settings)
        except InputError as error:
            refusal = str(error)
            break
        assert replica._plan.least <= free
        assert np.array_equal(gradient(replica, batch)[0], found)
        kept.append(replica._plan.resident)
        assert replica.residents.startswith("" if kept[-1] is None else f"{kept[-1]} of {LAYERS} ")
        stays = f"{kept[-1]} of {LAYERS} layers stay in memory, {LAYERS - (kept[-1] or 0)} are read"
        assert kept[-1] is None or f"cpu: {stays}" in caplog.text
        assert kept[-1] is None or gives_back in caplog.text
    assert kept[-1] == 0
    assert "use a smaller data.max_seq_len" in refusal, "nothing else is smaller"
    numbers = [LAYERS if each is None else each for each in kept]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) > 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"method": "full"}, "needs method lora"),
        ({"lora__use_dora": True}, "needs lora.use_dora false"),
        ({"parallel__tensor": 2}, "use all or auto"),
    ],
)
def test_what_cannot_stream_refuses_a_number(tiny: Tiny, settings: Any, why: str) -> None:
    with pytest.raises(InputError, match=f"model.resident 1.* {why}"):
        tiny.config("model", task="causal-lm", model__resident=1, **settings)
    tiny.config("model", task="causal-lm", model__resident="auto", **settings)
