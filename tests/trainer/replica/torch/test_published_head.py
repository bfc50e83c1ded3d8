"""A head of a model of transformers that is read in chunks computes what one that stays does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.covering import covering
from tests.trainer.replica.torch.test_published_weights import DENSE, SIZES, TARGETS
from tests.trainer.replica.torch.test_streamed_head import (
    WIDTH,
    check_head,
    reads_head,
    small_chunks,
)
from tests.trainer.replica.torch.test_streaming import FORMATS
from tests.trainer.replica.unlisted_models import write_tiny
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.replica.torch.streaming import StreamedEmbedding, StreamedHead
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

__all__ = ["reads_head", "small_chunks"]

TASKS: dict[str, dict[str, Any]] = {
    "causal-lm": {"task": "causal-lm"},
    "dpo": {"task": "dpo"},
    "distillation": {"task": "causal-lm", "distillation": {"alpha": 0.5}},
}
FAMILIES_OF_CODE = {**SIZES, **DENSE}
HEADS = covering(
    (family, task, form, tied)
    for family in FAMILIES_OF_CODE
    for task in TASKS
    for form in FORMATS
    for tied in (True, False)
    if family in ("qwen3_moe", "gemma2") or (task == "causal-lm" and form in ("fp32", "nf4"))
    if family != "gpt2" or "nf4" not in form
)
UNLISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("dense", {}),
    "phi in bf16": ("dense", {"model__dtype": "bfloat16"}),
    "codegen": ("out_proj", {"training__precision": "bf16"}),
    "gptj": ("out_proj", {}),
    "olmoe": ("o_proj", {"model__quantization": "nf4"}),
    "bloom": ("dense", {}),
    "mamba2": ("in_proj", {}),
    "olmo": ("o_proj", {}),
    "minicpm3": ("o_proj", {}),
    "opt": ("out_proj", {}),
    "xglm": ("out_proj", {}),
}
"""A linear that gets an adapter, and settings: heads with a bias, embeddings with a scale, norms
without a weight, so that no parameter of the base stays."""


def check_published_head(
    tiny: Tiny, folder: Path, settings: dict[str, Any], task: str, width: int = WIDTH
) -> Any:
    """Check the same of a model of transformers, and what stays of it; return it."""
    settings = {**settings, **TASKS[task]}
    with_teacher = task == "distillation"
    replica = check_head(tiny, folder, settings, with_teacher=with_teacher, width=width)
    model = replica._model
    assert isinstance(model.get_input_embeddings(), StreamedEmbedding)
    kept = [each for each in model.parameters() if not each.requires_grad]
    # Biases of NF4 have the format of its products.
    assert replica._plan.frozen == pytest.approx(sum(each.nbytes for each in kept), rel=0.06)
    return model


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize(("family", "task", "form", "tied"), HEADS)
def test_a_head_that_is_read_in_chunks_gives_the_bits_of_one_that_stays(
    tiny: Tiny, family: str, task: str, form: str, tied: bool
) -> None:
    dtype, stored = FORMATS[form]
    shape = {**FAMILIES_OF_CODE[family], "tie_word_embeddings": tied}
    folder = tiny.model(family, dtype=dtype, **shape)
    attention = TARGETS["attention"] if family in SIZES else {}
    check_published_head(tiny, folder, {**stored, **attention}, task)


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize(
    ("family", "task"), covering((f, task) for f in UNLISTED for task in TASKS)
)
def test_a_head_of_an_unlisted_family_is_read_with_its_bias(
    tiny: Tiny, tmp_path: Path, family: str, task: str
) -> None:
    target, settings = UNLISTED[family]
    folder = write_tiny(tmp_path / "model", family.partition(" ")[0])
    own = {**settings, "lora__target_modules": [target]}
    biased = family.startswith(("phi", "codegen", "gptj"))
    model = check_published_head(tiny, folder, own, task, WIDTH + biased)
    assert (model.lm_head.bias is not None) == biased


@pytest.mark.usefixtures("reads_head")
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "phi"])
def test_answers_are_those_of_the_resident_model(tiny: Tiny, tmp_path: Path, family: str) -> None:
    listed = family in FAMILIES_OF_CODE
    folder = tiny.model(family) if listed else write_tiny(tmp_path / "model", family)
    settings: dict[str, Any] = {"task": "causal-lm", "lora__target_modules": ["q_proj"]}
    resident, streamed = (
        tiny.start(folder, **settings, model__resident=each)[0] for each in ("all", 0)
    )
    model: Any = streamed._model
    assert isinstance(model.lm_head, StreamedHead)
    prompts = [[5, 6, 7], [8]]
    assert streamed.answer(prompts, 6, frozenset()) == resident.answer(prompts, 6, frozenset())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "gemma2", "granite", "phi", "mamba", "gpt_neox", "biogpt"]
)
def test_logits_of_a_teacher_are_those_of_the_resident_one(
    tiny: Tiny, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """A cap and a divisor, a bias, hidden states in fp32, and heads of other names."""
    listed = family in FAMILIES_OF_CODE
    folder = tiny.model(family) if listed else write_tiny(tmp_path / "model", family)
    windows = [np.arange(3, 30, dtype=np.int32), np.arange(40, 49, dtype=np.int32)]
    found = [
        torch.cat([*TorchEngine(folder, dtype, resident=each).iterate_logits(windows)])
        for each in (None, HEAD_STREAMED)
    ]
    assert torch.equal(*found)


def test_a_head_that_is_no_tensor_of_the_files_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "phi")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        InputError, match=rf"^{re.escape(str(folder))}: the head of PhiForCausalLM is no product"
    ) as caught:
        TorchEngine(folder, torch.float32, resident=HEAD_STREAMED)
    assert "\n" not in str(caught.value)
