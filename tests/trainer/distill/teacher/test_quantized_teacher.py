"""A teacher in NF4 computes the base of a QLoRA run, whether its layers stay or are read."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from tests.covering import covering
from tests.trainer.distill.teacher.test_streamed_teacher import FORWARD, streamed_of
from tests.trainer.distill.teacher.test_teacher import IN_ORDER, pieces
from tests.trainer.small_teacher import WIDE_SIZES, write_corpus, write_teacher
from trainer.commands.distill.audit import audit
from trainer.commands.distill.generate import generate
from trainer.commands.distill.inspect import inspect
from trainer.commands.distill.teacher import teacher as score
from trainer.config.distill_job import TeacherJob
from trainer.config.teacher_engines import TeacherEngine
from trainer.distill.answers.folder import AnswersFolder
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.teacher import torch_engine
from trainer.distill.teacher.torch_engine import open_torch, pad_windows
from trainer.planning.forward import ForwardSize, frozen_setup, plan_forward
from trainer.planning.model_config import read_shape
from trainer.replica.backend import Compute
from trainer.replica.torch.linear import disable_adapters
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import find_backbone
from trainer.replica.weights import nf4_file
from trainer.system.errors import InputError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

pytest.importorskip("bitsandbytes.functional")

DEEP: dict[str, dict[str, Any]] = {
    **{family: {"tie_word_embeddings": False} for family in ("qwen3", "llama")},
    "qwen2": {},
    "mistral": {"sliding_window": 16},
    "gemma2": {"final_logit_softcapping": 3.0},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "mixtral": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}
"""Settings of a config with four layers, by family."""
CASES = [
    (family, stored, dtype, resident)
    for family in DEEP
    for stored in ("float32", "bfloat16")
    for dtype in ("float32", "bfloat16")
    for resident in ("all", 0, 1, 3)
]


def make_folder(tiny: Tiny, family: str, stored: str = "float32") -> Path:
    return tiny.model(family, dtype=stored, num_hidden_layers=4, **DEEP[family])


@torch.no_grad()
def qlora_logits(tiny: Tiny, family: str, folder: Path, dtype: str) -> Tensor:
    """Return the logits of a QLoRA run's base at every token but the last of each window."""
    settings = {"model__dtype": dtype, "model__quantization": "nf4", "task": "causal-lm"}
    config = tiny.config(folder, **settings, lora__target_modules=["q_proj"])
    model: Any = load_model(folder, config, torch.device("cpu"))
    ids, rows, places = pad_windows([piece.tokens for piece in pieces(IN_ORDER)])
    with disable_adapters(model):
        if "final_logit_softcapping" in DEEP[family]:  # behind the head
            return model(ids, use_cache=False).logits[rows, places]
        return model.lm_head(find_backbone(model)(ids).last_hidden_state[rows, places])


@pytest.mark.parametrize(("family", "stored", "dtype", "resident"), covering(CASES))
def test_logits_are_those_of_the_base_of_a_qlora_run(
    tiny: Tiny, family: str, stored: str, dtype: str, resident: Any
) -> None:
    torch.set_num_threads(1)
    folder = make_folder(tiny, family, stored)
    engine = open_torch(folder, dtype, Compute("cpu", resident=resident), FORWARD, "nf4")
    assert len(streamed_of(engine)) == (0 if resident == "all" else 4 - resident)
    found = engine.iterate_logits([piece.tokens for piece in pieces(IN_ORDER)])
    logits = torch.cat([part.clone() for part in found])
    assert torch.equal(logits, qlora_logits(tiny, family, folder, dtype))
    plain = open_torch(folder, dtype, Compute("cpu", resident=resident), FORWARD)
    whole = torch.cat([*plain.iterate_logits([piece.tokens for piece in pieces(IN_ORDER)])])
    assert not torch.equal(logits, whole)


def test_experts_and_linears_are_quantised_once_and_read_by_every_teacher(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are stored in bf16 have one file for both dtypes."""
    for family in ("qwen3", "qwen3_moe"):
        folder = tiny.model(family, dtype="bfloat16", **DEEP[family], num_hidden_layers=3)
        open_torch(folder, "bfloat16", Compute("cpu"), FORWARD, "nf4")
        with monkeypatch.context() as patch:
            patch.setattr(nf4_file, "quantize", lambda _: pytest.fail("quantised again"))
            for dtype in ("bfloat16", "float32"):
                for resident in ("all", 1):
                    compute = Compute("cpu", resident=resident)
                    open_torch(folder, dtype, compute, FORWARD, "nf4")


def test_a_teacher_that_fits_in_nf4_alone_is_told_so(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, size = make_folder(tiny, "mistral"), ForwardSize(16, 16)

    def need(quantization: Any, size: ForwardSize = size) -> int:
        setup = frozen_setup(2, quantization)
        return plan_forward(read_shape(folder), setup, size, 0, accelerator=False).total

    assert need("nf4") < need("none")
    monkeypatch.setattr(torch_engine, "available_bytes", lambda _: need("nf4"))
    with pytest.raises(InputError, match=r"in bfloat16, .* free; --quantization nf4 needs 0.0 GB$"):
        open_torch(folder, "bfloat16", Compute("cpu"), size)
    engine = open_torch(folder, "bfloat16", Compute("cpu"), size, "nf4")
    assert len(streamed_of(engine)) == 4
    larger = ForwardSize(32, 16)
    with pytest.raises(InputError, match=r"in nf4 and bfloat16, .* free; --batch-tokens 16 fits$"):
        open_torch(folder, "bfloat16", Compute("cpu"), larger, "nf4")


def test_a_model_of_unknown_sizes_is_refused_in_nf4(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ctrl"}')
    with pytest.raises(InputError, match=r"^--quantization nf4: .*hidden_size must.*; use none$"):
        open_torch(tmp_path, "float32", Compute("cpu"), FORWARD, "nf4")


def test_rows_that_bitsandbytes_multiplies_wrongly_are_refused(tiny: Tiny) -> None:
    folder = tiny.model("qwen3", intermediate_size=96)
    with pytest.raises(InputError, match="down_proj is 96 wide; nf4 on the CPU needs a multiple"):
        open_torch(folder, "float32", Compute("cpu"), FORWARD, "nf4")


@pytest.mark.parametrize("engine", ["openvino", "gguf"])
def test_an_engine_without_nf4_refuses_it(tmp_path: Path, engine: TeacherEngine) -> None:
    corpus = write_corpus(tmp_path / "texts.jsonl", 2)
    why = rf"the engine {engine} holds weights as .*, not in nf4; take the engine torch or wgpu"
    words = ["model", "--data", str(corpus), "--out", str(tmp_path / "out")]
    words += ["--engine", engine, "--quantization", "nf4"]
    with pytest.raises(InputError, match=f"^--quantization nf4: {why}"):
        CliRunner().invoke(score, words, catch_exceptions=False)
    with pytest.raises(ValueError, match=why):
        TeacherJob(model="model", data=("texts",), engine=engine, quantization="nf4")
    assert TeacherJob(model="model", data=("texts",), quantization="nf4").quantization == "nf4"


def test_folders_name_the_quantisation_and_refuse_another(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "texts.jsonl", 12)
    model = write_teacher(tmp_path / "model", corpus, sizes=WIDE_SIZES)
    logits, answers = tmp_path / "logits", tmp_path / "answers"

    def call(command: Any, *words: Any) -> str:
        done = CliRunner().invoke(command, [*map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    scoring = [model, "--data", corpus, "--out", logits, "--max-seq-len", 64, "--resident", 1]
    scoring += ["--dtype", "float32", "--shard-bytes", 256]
    writing = [model, "--prompts", corpus, "--out", answers, "--max-new-tokens", 3]
    writing += ["--dtype", "float32"]
    for command, words, folder in (
        (score, scoring, LogitsFolder(logits)),
        (generate, writing, AnswersFolder(answers)),
    ):
        call(command, *words, "--quantization", "nf4")
        assert folder.description.teacher.quantization == "nf4"
        with pytest.raises(RefusedError, match=r"teacher\.quantization.*nf4.*none"):
            call(command, *words)
    last = LogitsFolder(logits).plans[-1]
    (damaged,) = (path for path in logits.glob(f"{last.name}*") if path.is_dir())
    before = {path: path.read_bytes() for path in damaged.iterdir()}
    shutil.rmtree(damaged)
    call(score, *scoring, "--quantization", "nf4", "--resident", "all")
    assert {path: path.read_bytes() for path in damaged.iterdir()} == before
    assert "(nf4, float32)" in call(inspect, logits)
    call(audit, logits, "--fraction", 1, "--gpu-backend", "cpu")
    with pytest.raises(InputError, match="the engine openvino holds weights as int8, not in nf4"):
        call(audit, logits, "--engine", "openvino")
