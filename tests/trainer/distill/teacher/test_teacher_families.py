"""Mixtures of experts and recurrent layers, as teachers: each engine's logits, or its refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.families import TEACHERS
from tests.trainer.published_forms import as_one_that_sees, changed
from tests.trainer.small_teacher import SIZES, teach, wish, write_corpus, write_teacher
from trainer.distill.teacher.engines import WeightType, engine_kind
from trainer.distill.teacher.generation import AnswerRequest, AnswerRun, assign_answers
from trainer.distill.teacher.torch_author import open_generate
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.planning.forward import ForwardSize
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import TinyModel
    from tests.trainer.tiny import Tiny

SPARSE = ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", *TEACHERS]
RECURRENT = ["qwen3_5_text"]
CPU = Compute("cpu")


def windows() -> list[NDArray[np.int32]]:
    """Return windows of several lengths, which are padded to the longest in a batch."""
    rng = np.random.default_rng(0)
    return [rng.integers(300, size=length, dtype=np.int32) for length in (23, 9, 70)]


@torch.no_grad()
def theirs(folder: Path, batch: Sequence[NDArray[np.int32]]) -> Tensor:
    """Return what transformers gives for one window at a time."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [model(torch.from_numpy(ids)[None].long(), use_cache=False).logits[0] for ids in batch]
    return torch.cat([row[:-1] for row in rows])


@pytest.mark.parametrize("model_type", [*SPARSE, *RECURRENT, "lfm2"])
def test_torch_gives_the_logits_of_transformers(tiny: Tiny, model_type: str) -> None:
    folder = tiny.model(model_type)
    engine = TorchEngine(folder, torch.float32)
    found = torch.cat([part.clone() for part in engine.iterate_logits(windows())])
    torch.testing.assert_close(found, theirs(folder, windows()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", [*SPARSE, *RECURRENT])
def test_openvino_refuses_in_one_line_before_it_loads_anything(tiny: Tiny, model_type: str) -> None:
    reason = "refuses a mixture" if model_type in SPARSE else "refuses recurrent layers"
    with pytest.raises(InputError, match=rf"{reason}.*; use --engine torch$") as refused:
        engine_kind("openvino").open(
            tiny.model(model_type), WeightType("float32"), CPU, ForwardSize(64, 64)
        )
    assert "\n" not in str(refused.value)


def test_a_model_that_also_sees_is_a_teacher_and_an_author(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """As Qwen3.5 is published: its language model's settings are nested in config.json."""
    corpus = write_corpus(tmp_path / "texts.jsonl", 4)
    words = write_teacher(tmp_path / "words", corpus)
    model = tiny_model("qwen3_5_text", vocab_size=SIZES.vocab_size)
    text = json.loads((model / "config.json").read_text())
    tree = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    sees = changed(model, tmp_path / "sees", as_one_that_sees, **tree)
    (sees / "config.json").write_text(json.dumps(tree))
    plain = Path(shutil.copytree(model, tmp_path / "plain"))
    entropies: dict[Path, list[Any]] = {}
    texts: dict[Path, list[str]] = {}
    for folder in (plain, sees):
        for file in words.glob("tokenizer*"):
            shutil.copy(file, folder)
        logits = teach(wish(folder, corpus, tmp_path / f"logits-{folder.name}")).folder
        windows = (window for plan in logits.plans for window in logits.read_shard(plan.number))
        entropies[folder] = [window.scores.entropy for window in windows]
        request = AnswerRequest(
            model=str(folder),
            prompts=corpus,
            output=tmp_path / f"answers-{folder.name}",
            max_new_tokens=4,
            sampling=Sampling(temperature=1.0),
            dtype="float32",
        )
        asked = assign_answers(request)
        AnswerRun(
            asked, partial(open_generate, asked.model_dir, "float32", CPU, 2, asked.slots)
        ).make_shards()
        answers = (
            each for plan in asked.folder.plans for each in asked.folder.read_shard(plan.number)
        )
        texts[folder] = [answer.text for answer in answers]
    for one, other in zip(entropies[sees], entropies[plain], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert texts[sees] == texts[plain]
