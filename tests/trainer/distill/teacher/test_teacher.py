"""What a teacher stores is what transformers says of the same window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from tests.trainer.replica.unlisted_models import write_tiny
from tests.trainer.small_teacher import SCHEMES, TOPK
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.teacher import torch_engine
from trainer.distill.teacher.scoring import Teacher
from trainer.distill.teacher.torch_engine import (
    TorchEngine,
    check_room,
    emulates_bf16,
    open_torch,
    weight_bytes,
)
from trainer.distill.teacher.windows import UnscoredWindow
from trainer.model.safetensors_headers import read_headers
from trainer.planning.device_models import DeviceModel
from trainer.planning.forward import ForwardSize
from trainer.planning.model_config import read_shape
from trainer.planning.teachers import BATCH, WINDOW, TeacherDevice, teacher_options
from trainer.replica.backend import Compute
from trainer.system.errors import InputError, NonFiniteError

SIZE = 290
"""Tokens of the tokenizer; the models of `tiny_model` know 300."""
IN_ORDER = np.arange(SIZE, dtype=np.int32)
TRIMMED = np.sort(np.random.default_rng(0).permutation(SIZE)[:120]).astype(np.int32)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "mistral": {},  # by transformers' own code
    # Its logits are capped behind the head.
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
}


def pieces(
    ids: NDArray[np.int32], lengths: Sequence[int] = (9, 1, 33, 2, 20)
) -> list[UnscoredWindow]:
    draw = np.random.default_rng(3)
    return [
        UnscoredWindow(number, 64 * number, draw.integers(len(ids), size=length).astype(np.int32))
        for number, length in enumerate(lengths)
    ]


def make_teacher(
    folder: Path,
    scheme: Scheme = TOPK,
    ids: NDArray[np.int32] = IN_ORDER,
    batch_tokens: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Teacher:
    torch.set_num_threads(1)
    return Teacher(TorchEngine(folder, dtype), scheme, ids, seed=5, batch_tokens=batch_tokens)


def plain_log_p(
    folder: Path, tokens: NDArray[np.int32], temperature: float, dtype: torch.dtype
) -> NDArray[np.float64]:
    """Return log p of every teacher token at positions 1 to T - 1, by the model's own forward."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
    return (logits.double() / temperature).log_softmax(1).numpy()


@pytest.mark.parametrize("ids", [IN_ORDER, TRIMMED], ids=["in order", "trimmed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stored_log_probabilities_are_those_of_a_plain_forward(
    tiny_model: Any, architecture: str, ids: NDArray[np.int32]
) -> None:
    folder = tiny_model(architecture, **ARCHITECTURES[architecture])
    scheme = Scheme(kind="topk", top_k=8, tail_samples=4, temperature=1.25)
    teacher = make_teacher(folder, scheme, ids)
    assert isinstance(teacher.engine, TorchEngine)
    hidden = teacher.engine._backbone(torch.tensor([[1, 2]]))
    assert (hidden.shape[-1] == teacher.engine.vocab_size) == (architecture == "gemma2")
    for piece, window in zip(pieces(ids), teacher.score_pieces(pieces(ids)), strict=True):
        np.testing.assert_array_equal(window.tokens, piece.tokens)
        assert (window.document, window.start) == (piece.document, piece.start)
        scores = window.scores
        assert len(scores.offsets) == len(piece.tokens) + 1
        assert scores.logprobs is not None
        if len(piece.tokens) == 1:
            assert not len(scores.ids)
            continue
        log_p = plain_log_p(folder, ids[piece.tokens], 1.25, torch.float32)
        for position in range(1, len(piece.tokens)):
            entries = slice(*scores.offsets[position : position + 2])
            live, found = log_p[position - 1, ids], scores.ids[entries]
            np.testing.assert_allclose(scores.logprobs[entries], live[found], atol=1e-4)
            kept = found[scores.counts[entries] == 0]
            best = np.sort(live)[::-1][:8]
            np.testing.assert_allclose(live[kept], best, atol=1e-5)  # equal ones may change places
            assert scores.tail[position] == pytest.approx(1 - np.exp(best).sum(), abs=1e-5)
            assert scores.dropped[position] == pytest.approx(1 - np.exp(live).sum(), abs=1e-5)


def test_in_half_precision_the_scores_are_near_those_in_single(tiny_model: Any) -> None:
    """In bf16 a logit has 8 bits: KL of the halves to the whole, as an audit measures it."""
    folder = tiny_model("qwen3")
    (piece,) = pieces(IN_ORDER, [60])
    (window,) = make_teacher(folder, SCHEMES["full"], dtype=torch.bfloat16).score_pieces([piece])
    assert window.scores.logprobs is not None
    stored = window.scores.logprobs.reshape(59, SIZE).astype(np.float64)
    live = plain_log_p(folder, piece.tokens, 1.0, torch.float32)[:, :SIZE]
    kl = (np.exp(stored) * (stored - live)).sum(1)
    assert kl.max() < 1e-3


@pytest.mark.parametrize("kind", SCHEMES)
def test_batches_change_nothing_beyond_float_noise(tiny_model: Any, kind: str) -> None:
    folder = tiny_model("qwen3")
    alone = make_teacher(folder, SCHEMES[kind], batch_tokens=1).score_pieces(pieces(IN_ORDER))
    together = make_teacher(folder, SCHEMES[kind], batch_tokens=999).score_pieces(pieces(IN_ORDER))
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


def assert_same(one: Window, other: Window) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    for name in ("offsets", "ids", "counts"):
        np.testing.assert_array_equal(getattr(one.scores, name), getattr(other.scores, name))
    for name in ("logprobs", "tail", "dropped", "entropy"):
        left, right = getattr(one.scores, name), getattr(other.scores, name)
        if left is not None:
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_a_padded_vocabulary_never_gets_into_the_entries(tiny_model: Any, tmp_path: Path) -> None:
    """Rows of the head that no token stands for may hold anything."""
    folder = tiny_model("llama", tie_word_embeddings=False)
    model = TorchEngine(folder, torch.float32)
    head = model.model.get_parameter("lm_head.weight")
    with torch.no_grad():
        head[SIZE:] = head[:10] * 40
    teacher = Teacher(model, TOPK, IN_ORDER, seed=5, batch_tokens=64)
    windows = teacher.score_pieces(pieces(IN_ORDER))
    assert max(window.scores.ids.max(initial=0) for window in windows) < SIZE
    assert max(window.scores.dropped.max() for window in windows) > 0.1


def test_damaged_weights_are_named_with_the_document(tiny_model: Any) -> None:
    model = TorchEngine(tiny_model("qwen3"), torch.float32)
    with torch.no_grad():
        model.model.get_parameter("model.embed_tokens.weight")[7] = torch.nan
    draw = [UnscoredWindow(4, 128, np.array([1, 7, 3], np.int32))]
    with pytest.raises(NonFiniteError, match=r"document 4, token 128"):
        Teacher(model, TOPK, IN_ORDER, seed=5, batch_tokens=64).score_pieces(draw)


class Cramped(TorchEngine):
    """A model on a device where only so many tokens of one forward fit."""

    fits = 40
    refused = 0

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        if len(batch) * max(len(tokens) for tokens in batch) > self.fits:
            self.refused += 1
            raise torch.OutOfMemoryError("no room")
        return super().iterate_logits(batch)


def test_a_batch_that_does_not_fit_is_halved(tiny_model: Any) -> None:
    model = Cramped(tiny_model("qwen3"), torch.float32)
    found = Teacher(model, TOPK, IN_ORDER, seed=5, batch_tokens=999).score_pieces(pieces(IN_ORDER))
    assert model.refused
    for one, other in zip(
        found, make_teacher(tiny_model("qwen3")).score_pieces(pieces(IN_ORDER)), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_windows_of_a_token_alone_have_no_scores(tiny_model: Any, scheme: Scheme) -> None:
    """A document of one token more than a window leaves such a one, maybe in a batch of its own."""

    class Sparing(TorchEngine):
        """Computes nothing if nothing is predicted, as llama.cpp's does."""

        def iterate_logits(self, batch: Any) -> Any:
            return (
                super().iterate_logits(batch)
                if any(len(tokens) > 1 for tokens in batch)
                else iter(())
            )

    engine = Sparing(tiny_model("qwen3"), torch.float32)
    teacher = Teacher(engine, scheme, IN_ORDER, seed=5, batch_tokens=1)
    for window, piece in zip(
        teacher.score_pieces(pieces(IN_ORDER, [1, 1, 9])), pieces(IN_ORDER, [1, 1, 9]), strict=True
    ):
        np.testing.assert_array_equal(window.tokens, piece.tokens)
        assert len(window.scores.tail) == len(piece.tokens)
        assert (len(window.scores.ids) > 0) == (len(piece.tokens) > 1)


@pytest.mark.parametrize("kind", SCHEMES)
def test_scores_of_what_is_learned_are_those_of_the_whole_window(
    tiny_model: Any, tmp_path: Path, kind: str
) -> None:
    teacher, draw = make_teacher(tiny_model("qwen3"), SCHEMES[kind]), np.random.default_rng(2)
    whole = pieces(IN_ORDER)
    some = [replace(piece, learned=draw.random(len(piece.tokens)) < 0.4) for piece in whole]
    some[-1] = replace(some[-1], learned=np.zeros(len(some[-1].tokens), bool))
    for piece, window, other in zip(
        some, teacher.score_pieces(some), teacher.score_pieces(whole), strict=True
    ):
        ours, theirs = window.scores, other.scores
        for t in range(len(piece.tokens)):
            here, there = (slice(*each.offsets[t : t + 2]) for each in (ours, theirs))
            if not piece.is_scored[t]:
                assert here.start == here.stop
                assert ours.tail[t] == ours.dropped[t] == ours.entropy[t] == 0
                continue
            np.testing.assert_array_equal(ours.ids[here], theirs.ids[there])
            np.testing.assert_array_equal(ours.counts[here], theirs.counts[there])
            assert (ours.tail[t], ours.entropy[t]) == (theirs.tail[t], theirs.entropy[t])


def test_host_memory_that_torch_cannot_get_is_no_room_either(tiny_model: Any) -> None:
    class Full(Cramped):
        def iterate_logits(self, batch: Any) -> Any:
            try:
                return super().iterate_logits(batch)
            except torch.OutOfMemoryError:
                torch.empty(1 << 60, dtype=torch.uint8)  # raises what the CPU's allocator does
                raise

    found = Teacher(
        Full(tiny_model("qwen3"), torch.float32), TOPK, IN_ORDER, seed=5, batch_tokens=999
    ).score_pieces(pieces(IN_ORDER))
    assert len(found) == len(pieces(IN_ORDER))


def test_a_window_that_never_fits_is_an_error(tiny_model: Any) -> None:
    model = Cramped(tiny_model("qwen3"), torch.float32)
    with pytest.raises(InputError, match="41 tokens does not fit"):
        Teacher(model, TOPK, IN_ORDER, seed=5, batch_tokens=999).score_pieces(
            pieces(IN_ORDER, [41])
        )


def test_a_model_that_cannot_be_loaded_is_named(tiny_model: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match="cannot be loaded"):
        TorchEngine(tmp_path, torch.float32)


def test_a_model_whose_sizes_no_plan_knows_is_a_teacher(tmp_path: Path) -> None:
    """Its config calls the hidden size `emb_dim`."""
    folder = write_tiny(tmp_path / "model", "xlm")
    with pytest.raises(InputError, match="hidden_size"):
        read_shape(folder)
    engine = open_torch(folder, "float32", Compute("cpu"), ForwardSize(64, 64))
    (logits,) = engine.iterate_logits([np.arange(3, 30, dtype=np.int32)])
    assert logits.shape == (26, 300)


@pytest.mark.parametrize(
    ("capabilities", "emulates"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_a_cpu_without_bf16_is_known(capabilities: dict[str, Any], emulates: bool) -> None:
    assert emulates_bf16(capabilities) == emulates


def test_torch_tells_what_this_cpu_can() -> None:
    found = torch.cpu.get_capabilities()
    if found["architecture"] == "x86_64":
        assert found.keys() >= {"avx512_bf16", "amx_bf16"}


FORWARD = ForwardSize(BATCH["cpu"], WINDOW)


@pytest.mark.parametrize(
    ("stored", "dtype", "advice"),
    [
        ("bfloat16", "float32", "--dtype bfloat16 needs 0.0 GB"),
        ("float16", "float32", "use a GGUF file of it, with --engine gguf"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_would(
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stored: str,
    dtype: str,
    advice: str,
) -> None:
    """Transformers maps those that are stored as they are computed with, which fit always."""
    folder = tiny_model("granite", dtype=stored)
    monkeypatch.setattr(torch_engine, "free_memory", lambda _: 1000)
    with pytest.raises(InputError, match=rf"needs \S+ GB of main memory in {dtype}.*{advice}"):
        check_room(folder, getattr(torch, dtype))
    if stored == "bfloat16":
        check_room(folder, torch.bfloat16)
        assert "weights take 0.0 GB, and 0.0 GB of main memory are free for them" in caplog.text


@pytest.mark.parametrize("family", ["qwen3", "mistral", "granite", "qwen3_moe"])
def test_a_forward_that_does_not_fit_is_refused_as_the_plan_foresees(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Under a limit of memory the kernel would kill the teacher at its first forward."""
    folder = tiny_model(family, dtype="bfloat16", num_hidden_layers=4)
    shape = read_shape(folder)
    host = DeviceModel(name="host", flops=1e12, memory=1 << 40, watts=None, source="assumed")
    planned = {
        one.format.weights: one.least
        for one in teacher_options(shape, [TeacherDevice("cpu", host)], WINDOW)
        if one.format.engine == "torch"
    }
    free = planned["bfloat16"]
    monkeypatch.setattr(torch_engine, "free_memory", lambda _: free)
    monkeypatch.setattr(torch_engine, "available_bytes", lambda _: free)
    open_torch(folder, "bfloat16", Compute("cpu"), FORWARD)
    free -= 1
    with pytest.raises(InputError, match=r"in bfloat16, .* are free; --batch-tokens 2048 fits$"):
        open_torch(folder, "bfloat16", Compute("cpu"), FORWARD)
    other = "a host with more memory" if shape.experts > 1 else "a GGUF file of it"
    long = ForwardSize(BATCH["cpu"], BATCH["cpu"])
    with pytest.raises(InputError, match="--quantization nf4 needs"):
        open_torch(folder, "bfloat16", Compute("cpu"), long)
    free = 1000
    with pytest.raises(InputError, match=f"in nf4 and bfloat16.*use {other}"):
        open_torch(folder, "bfloat16", Compute("cpu"), long, "nf4")
    free = planned["float32"] - 1
    with pytest.raises(InputError, match="in float32"):
        open_torch(folder, "float32", Compute("cpu"), FORWARD)


def test_experts_that_are_stored_alone_are_loaded(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers stacks them, so that they take memory although the file has their dtype."""
    folder = tiny_model("qwen3_moe", dtype="bfloat16")
    experts = {name: header for name, header in read_headers(folder).items() if ".experts." in name}
    loaded, mapped = weight_bytes(folder, torch.bfloat16)
    assert loaded == sum(header.end - header.begin for header in experts.values())
    assert mapped > 0
    monkeypatch.setattr(torch_engine, "free_memory", lambda _: 1000)
    message = r"in bfloat16, and 0\.0 GB are free; use a host with more memory, or a smaller"
    with pytest.raises(InputError, match=message):
        check_room(folder, torch.bfloat16)
