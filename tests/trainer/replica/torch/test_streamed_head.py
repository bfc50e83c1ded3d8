"""A head that is read in chunks of its rows computes what one that stays does, bit for bit."""

from __future__ import annotations

import math
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.covering import covering
from tests.trainer.replica.driving import gradient, taught, train
from tests.trainer.replica.torch.test_streaming import FORMATS, LAYERS, TASKS
from trainer.model.layout import build_layout
from trainer.planning import logit_chunks, stored_layers
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.replica import residence
from trainer.replica.sampling import Sampling
from trainer.replica.torch import kd_loss, loader
from trainer.replica.torch import replica as torch_replica
from trainer.replica.torch.generator import load_generator
from trainer.replica.torch.streaming import StreamedEmbedding, StreamedHead
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

ROWS, WIDTH, VOCABULARY = 32, 64, 300
HEADS = covering(
    (family, task, form, tied)
    for family in ("qwen3", "llama")
    for task in ("causal-lm", "dpo", "distillation", "packed")
    for form in FORMATS
    for tied in (True, False)
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut heads of tiny models into ten chunks, and their logits into chunks of 20 tokens."""
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", ROWS * WIDTH)
    monkeypatch.setattr(kd_loss, "LOGIT_ELEMENTS", 20 * VOCABULARY)


@pytest.fixture
def reads_head(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model without resident layers read its head, whatever memory there is."""
    monkeypatch.setattr(residence, "stream_head", lambda _found, plan, *_: plan(HEAD_STREAMED))


def check_head(
    tiny: Tiny, folder: Path, settings: dict[str, Any], *, with_teacher: bool, width: int = WIDTH
) -> Any:
    """Check that training with a head that is read has the bits of one that stays.

    Return the replica.
    """
    settings = settings | {"training__micro_batch_size": 2, "lora__lora_rank": 4}
    batch = tiny.batch(5, settings["task"])
    batch = taught(batch) if with_teacher else batch
    whole = train(*tiny.start(folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.start(folder, **settings, model__resident=0)
    model: Any = replica._model
    assert isinstance(model.lm_head, StreamedHead)
    for chunks in (1, 2, 4):
        model.lm_head.logit_chunks = chunks
        replica.write_trainable(weights)
        assert train(replica, weights, batch) == whole
    chunks = -(-VOCABULARY // (ROWS * WIDTH // width))
    assert len(model.lm_head._stream.feed._weights.layers) == chunks
    return replica


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize(("family", "task", "form", "tied"), HEADS)
def test_a_head_that_is_read_in_chunks_gives_the_bits_of_one_that_stays(
    tiny: Tiny, family: str, task: str, form: str, tied: bool
) -> None:
    dtype, stored = FORMATS[form]
    shape: dict[str, Any] = {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    folder = tiny.model(family, dtype=dtype, **shape)
    replica = check_head(tiny, folder, TASKS[task] | stored, with_teacher=task == "distillation")
    model: Any = replica._model
    assert isinstance(model.model.embed_tokens, StreamedEmbedding)
    kept = [each for each in model.parameters() if not each.requires_grad]
    assert replica._plan.frozen == sum(each.nbytes for each in kept)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("task", ["causal-lm", "dpo"])
def test_a_head_is_read_twice_for_each_chunk_of_logits(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Once up and once down; the last chunk and the first are still there at their next use."""
    monkeypatch.setattr(residence, "stream_head", lambda _found, plan, *_: plan(HEAD_STREAMED))
    monkeypatch.setattr(kd_loss, "LOGIT_ELEMENTS", 1 << 25)
    folder, chunks = tiny.model(num_hidden_layers=LAYERS), -(-VOCABULARY // ROWS)
    replica, _ = tiny.start(folder, task=task, model__resident=0)
    batch = tiny.batch(2, task)
    gradient(replica, batch)
    head: Any = replica._model.lm_head  # pyright: ignore[reportAttributeAccessIssue]
    before = head._stream.feed.reads
    gradient(replica, batch)
    reference = chunks if task == "dpo" else 0
    assert head._stream.feed.reads - before == 2 * (chunks - 2) + reference


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize("task", ["causal-lm", "dpo"])
def test_one_read_of_a_head_serves_the_chunks_of_logits_that_memory_is_left_for(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr(logit_chunks, "LOGIT_ELEMENTS", 20 * VOCABULARY)
    settings: dict[str, Any] = {"task": task, "training__gradient_checkpointing": True}
    settings |= {"data__max_seq_len": 64, "training__micro_batch_size": 1, "model__resident": 0}
    folder, each = tiny.model(num_hidden_layers=LAYERS), 4 * 20 * (VOCABULARY + WIDTH)
    rows = 2 if task == "dpo" else 1
    most, free = -(-64 * rows // 20), 1e12
    monkeypatch.setattr(torch_replica, "available_bytes", lambda _: free)
    whole = tiny.start(folder, **settings)[0]._plan
    assert whole.logit_chunks == most
    least, batch = whole.least - (most - 1) * each, tiny.batch(1, task)
    reads: dict[int, int] = {}
    results: list[bytes] = []
    for chunks in (1, 2, most):
        free = (least + (chunks - 1) * each + 1) / 0.9
        replica, _ = tiny.start(folder, **settings)
        assert replica._plan.logit_chunks == chunks
        assert replica._plan.least == least + (chunks - 1) * each <= 0.9 * free
        gradient(replica, batch)
        head: Any = replica._model.lm_head  # pyright: ignore[reportAttributeAccessIssue]
        before = head._stream.feed.reads
        results.append(gradient(replica, batch)[0].tobytes())
        reads[chunks] = head._stream.feed.reads - before
    assert len(set(results)) == 1
    pieces = -(-VOCABULARY // ROWS)
    answers: Any = batch[0].answers
    targets = sum(sum(label >= 0 for label in row.labels[1:]) for row in answers)
    for chunks, found in reads.items():
        uses = math.ceil(math.ceil(targets / 20) / chunks)
        reference = uses * pieces if task == "dpo" else 0
        assert found == pytest.approx(uses * 2 * (pieces - 2) + reference, abs=2)


@pytest.mark.usefixtures("reads_head")
def test_chunks_of_logits_are_fewer_before_micro_batches_are_smaller(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, _ = tiny.start(
        tiny.model(num_hidden_layers=LAYERS), task="causal-lm", model__resident=0
    )
    model: Any = replica._model
    batch, limit, real = tiny.batch(3, "causal-lm"), replica.split.limit, kd_loss.multiply_head
    expected = gradient(replica, batch)[0]

    def crowded(rows: Any, head: Any, *, trains: bool) -> Any:
        if len(rows) > 1:
            raise MemoryError
        return real(rows, head, trains=trains)

    monkeypatch.setattr(kd_loss, "multiply_head", crowded)
    model.lm_head.logit_chunks = 5
    assert gradient(replica, batch)[0].tobytes() == expected.tobytes()
    assert model.lm_head.logit_chunks == 1
    assert replica.split.limit == limit


@pytest.mark.usefixtures("reads_head")
def test_answers_with_a_head_that_is_read_are_those_of_the_resident_model(tiny: Tiny) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS)
    prompts = [[5, 6, 7], [8]]
    settings: dict[str, Any] = {"task": "causal-lm", "lora__lora_rank": 4}
    resident, weights = tiny.start(folder, **settings)
    expected = resident.answer(prompts, 6, frozenset())
    streamed, _ = tiny.start(folder, **settings, model__resident=0)
    assert streamed.answer(prompts, 6, frozenset()) == expected
    config = tiny.config(folder, **settings, model__resident=0)
    made = load_generator(folder, config, build_layout(folder, config), weights, threads=1)
    answers = made.generate(prompts, max_new_tokens=6, sampling=Sampling(), stop=frozenset())
    assert answers == expected


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_teacher_whose_head_is_read_has_the_logits_of_the_resident_one(
    tiny: Tiny, dtype: torch.dtype, tied: bool
) -> None:
    folder = tiny.model(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        found = [
            model.lm_head(model.model(ids).last_hidden_state)
            for model in (
                loader.load_frozen(folder, dtype, torch.device("cpu"), resident)
                for resident in (None, HEAD_STREAMED)
            )
        ]
    assert torch.equal(*found)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("family", "settings", "reads"),
    [
        (family, settings, reads)
        for settings, reads in (
            ({"task": "causal-lm"}, True),
            ({}, False),
            ({"task": "causal-lm", "lora__modules_to_save": ["lm_head"]}, False),
            ({"task": "causal-lm", "lora__modules_to_save": ["embed_tokens"]}, True),
        )
        for family in ("qwen3", "gemma2")
    ],
)
@pytest.mark.parametrize("asked", ["auto", 0])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_read_where_no_layer_stays_and_it_does_not_fit(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
    reads: bool,
    asked: Any,
    tied: bool,
) -> None:
    folder = tiny.model(family, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    settings = settings | {"training__batch_size": 1, "training__gradient_checkpointing": True}
    least = tiny.start(folder, **settings, model__resident=0)[0]._plan.least
    for more, streamed in ((1, False), (-1, True)):
        free = least / 0.9 + more
        monkeypatch.setattr(torch_replica, "available_bytes", lambda _, free=free: free)
        if streamed and not reads:
            with pytest.raises(InputError, match="the run needs"):
                tiny.start(folder, **settings, model__resident=asked)
            continue
        replica, _ = tiny.start(folder, **settings, model__resident=asked)
        assert replica._plan.resident == (HEAD_STREAMED if streamed else 0)
        assert replica._plan.least <= 0.9 * free
        head = " with the head" if streamed else ""
        assert replica.residents == f"0 of {LAYERS} layers resident, {LAYERS} streamed{head}"
        gradient(replica, tiny.batch(2, settings.get("task", "classify")))


@pytest.mark.usefixtures("small_chunks")
def test_a_refusal_advises_shorter_samples_only_where_some_fit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"task": "causal-lm", "training__gradient_checkpointing": True}
    folder, free = tiny.model(num_hidden_layers=LAYERS), 0.0
    monkeypatch.setattr(torch_replica, "available_bytes", lambda _: free)
    needs: list[float] = []
    for length in (16, 64):
        free = 1e12
        with monkeypatch.context() as patch:
            patch.setattr(residence, "stream_head", lambda _found, plan, *_: plan(HEAD_STREAMED))
            own: dict[str, Any] = settings | {"data__max_seq_len": length, "model__resident": 0}
            needs.append(tiny.start(folder, **own)[0]._plan.least / 0.9)
    free = sum(needs) / 2
    with pytest.raises(InputError, match=r"are free; use a smaller data\.max_seq_len$"):
        tiny.start(folder, **settings, data__max_seq_len=64)
    gradient(tiny.start(folder, **settings, data__max_seq_len=16)[0], tiny.batch(1, "causal-lm"))
    free = needs[0] - 2
    with pytest.raises(
        InputError, match=r"use model\.quantization nf4 or a device with more memory$"
    ):
        tiny.start(folder, **settings, data__max_seq_len=64)


@pytest.mark.usefixtures("reads_head")
def test_a_file_that_is_cut_under_a_head_ends_the_step_with_one_line(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.model(num_hidden_layers=LAYERS), folder)
    replica, _ = tiny.start(folder, task="causal-lm", model__resident=0)
    model: Any = replica._model
    hidden, wanted = torch.ones(3, WIDTH, requires_grad=True), torch.tensor([1, 2, 3])
    kd_loss.token_losses(hidden, model.lm_head, wanted)
    path = folder / "model.safetensors"
    os.truncate(path, 4096)
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: .*trunc") as caught:
        kd_loss.token_losses(hidden, model.lm_head, wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_head_in_chunks_has_the_loss_and_gradient_of_the_whole_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits have its bits; the gradient sums over the vocabulary chunk by chunk."""
    generator = torch.Generator().manual_seed(0)
    rows, head = (
        torch.randn(size, 256, generator=generator).to(dtype).requires_grad_(size == 37)
        for size in (37, 5000)
    )
    wanted = torch.arange(37)
    found: list[tuple[float, torch.Tensor]] = []
    for elements in (1 << 30, 512 * 256):
        monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", elements)
        loss = kd_loss.token_losses(rows, head, wanted).loss
        found.append((loss.item(), torch.autograd.grad(loss, rows)[0].double()))
    (whole, expected), (loss, chunked) = found
    assert loss == whole
    error = float((chunked - expected).norm() / expected.norm())
    assert error < (1e-6 if dtype == torch.float32 else 5e-3)
