"""The language model of one that also sees trains, in the forms in which such are published."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from tests.trainer.published_forms import as_gemma_3, as_one_that_sees, changed
from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from tests.trainer.replica.test_families import write_trained
from tests.trainer.replica.unlisted_models import SEES, whole_class, write_tiny, write_whole
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.merge import merge
from trainer.data.encoder import IGNORED
from trainer.model.families import explain_transformers_only
from trainer.model.header_layout import PEFT_PREFIX
from trainer.model.layout import GradientLayout, build_layout
from trainer.model.tensor_names import language_name
from trainer.planning.model_config import read_shape

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.mark.parametrize("model_type", SEES)
def test_a_language_model_and_its_files_are_those_of_transformers_and_peft(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    """PEFT opens the adapter on the whole model; a merged one is the language model."""
    import peft
    import transformers

    folder = write_whole(tmp_path / "model", model_type)
    whole = whole_class(tree := transformers.AutoConfig.from_pretrained(folder))
    config = tiny.config(folder, task="causal-lm")
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    adapter = write_trained(tmp_path / "out", folder, config, layout, weights)
    model: Any = whole.from_pretrained(folder, config=tree)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # as the product does: docs/config.md
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    batch, total = tiny.batch(6, "causal-lm"), torch.zeros(())
    for sample in batch:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        logits = logits_of_text(model, ids)[0, :-1]
        assert isinstance(sample.labels, np.ndarray)
        wanted = torch.from_numpy(sample.labels[1:].astype(np.int64))
        total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    total.backward()
    grads = {
        name.replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert sorted(grads) == sorted(slot.name for slot in layout.iter_tensors())
    zero = torch.zeros(())
    parts = (grads[slot.name] for slot in layout.iter_tensors())
    expected = np.concatenate(
        [(zero.expand(p.shape) if p.grad is None else p.grad).numpy().ravel() for p in parts]
    )
    mine, found, _ = gradient(start(folder, config)[0], batch)
    assert found.loss_sum == pytest.approx(total.item(), rel=1e-5)
    assert relative(mine, expected) < 1e-5
    if model_type != "llama4":  # whose class multiplies experts by code of its own
        streamed = config.with_settings({"model.resident": 0})
        assert relative(gradient(start(folder, streamed)[0], batch)[0], mine) < 1e-5
    trained = load_trained(adapter)
    assert trained.weights is not None
    assert np.array_equal(trained.weights, weights)

    merged_folder = tmp_path / "merged"
    told = CliRunner().invoke(merge, [str(adapter), "-o", str(merged_folder)])
    assert told.exit_code == 0
    assert f"{folder}: the merged model is its language model alone" in told.stderr
    causal: Any = transformers.AutoModelForCausalLM
    if model_type in ("emu3", "mllama"):  # there under the type of the whole model alone
        causal = causal._model_mapping[type(tree)]
    merged = causal.from_pretrained(merged_folder).eval()
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        logits = (merged(input_ids=ids).logits, logits_of_text(model.eval(), ids))
    assert relative(logits[0].numpy(), logits[1].numpy()) < 1e-5


def logits_of_text(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a whole model, by tokens that are no part of a picture."""
    takes = inspect.signature(model.base_model.model.forward).parameters
    kinds = {
        key: torch.zeros_like(ids)
        for key in ("token_type_ids", "mm_token_type_ids")
        if key in takes
    }
    return model(input_ids=ids, use_cache=False, **kinds).logits


def test_a_language_model_trains_without_the_packages_of_other_parts(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Gemma 3n sees by timm, which is not installed."""
    plain = write_tiny(tmp_path / "plain", "gemma3n_text")
    text = json.loads((plain / "config.json").read_text())
    folder = changed(plain, tmp_path / "sees", as_one_that_sees)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text}))
    compare_gradients(tiny, folder, plain, "lora")


@pytest.mark.parametrize("form", [as_gemma_3, as_one_that_sees])
@pytest.mark.parametrize(
    ("model_type", "outer"),
    [("gemma3_text", "gemma3"), ("ministral3", "mistral3"), ("mistral", "mistral3")],
)
def test_names_of_either_form_give_the_gradients_of_the_language_model(
    tiny: Tiny, tmp_path: Path, model_type: str, outer: str, form: Any
) -> None:
    plain = tiny.model(model_type, tie_word_embeddings=model_type == "gemma3_text")
    text = json.loads((plain / "config.json").read_text())
    folder = changed(plain, tmp_path / "sees", form)
    (folder / "config.json").write_text(json.dumps({"model_type": outer, "text_config": text}))
    assert f"layers of {outer} are computed by" in str(
        explain_transformers_only({"model_type": outer})
    )
    assert read_shape(folder).counted == read_shape(plain).counted
    for method in ("lora", "full"):
        compare_gradients(tiny, folder, plain, method)


def compare_gradients(tiny: Tiny, folder: Path, plain: Path, method: str) -> None:
    """Compare a model with other parts with its language model alone."""
    batch = tiny.batch(4, "causal-lm")
    configs = [tiny.config(model, task="causal-lm", method=method) for model in (folder, plain)]
    mine, expected = (build_layout(Path(one.model.path), one) for one in configs)
    if method == "lora":
        first = mine.blocks[0].tensors[0].name
        assert first.startswith("base_model.model.model.language_model.layers.0.")
    replica, weights = start(plain, configs[1])
    wanted = by_name(expected, gradient(replica, batch)[0])
    values = by_name(expected, weights)
    replica, _ = start(folder, configs[0])
    replica.write_trainable(np.concatenate([values[name] for name in names(mine)]))
    found = by_name(mine, gradient(replica, batch)[0])
    assert found.keys() == wanted.keys()
    for name, part in found.items():
        assert relative(part, wanted[name]) < 1e-5, name


def names(layout: GradientLayout) -> list[str]:
    """Return the names of a layout's tensors in the language model."""
    return [language_name(slot.name.removeprefix(PEFT_PREFIX)) for slot in layout.iter_tensors()]


def by_name(layout: GradientLayout, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parts of a flat vector."""
    parts = (flat[slot.start : slot.stop] for slot in layout.iter_tensors())
    return dict(zip(names(layout), parts, strict=True))
