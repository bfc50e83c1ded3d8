"""Every family that transformers' code computes, against transformers and PEFT themselves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from tests.families import COMPUTED_HERE
from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from trainer.data.encoder import IGNORED
from trainer.model.families import FAMILIES, is_dropout
from trainer.model.hf_export import ADAPTER_FILE, MODEL_FILE, companions, file_pieces
from trainer.model.layout import GradientLayout, build_layout
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from tests.trainer.replica.conftest import MakeBatch
    from trainer.config.run import RunConfig
    from trainer.data.tokens import Encoded

OTHERS = [
    name
    for name, family in FAMILIES.items()
    if family.code == "transformers" and name not in (*COMPUTED_HERE, "qwen3_5")
]
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def write_trained(
    folder: Path, base: Path, config: RunConfig, layout: GradientLayout, weights: np.ndarray
) -> Path:
    """Write the files of a checkpoint that other programs read."""
    folder.mkdir()
    for name, content in companions(config, base).items():
        pieces = file_pieces(content) if isinstance(content, Path) else [content]
        (folder / name).write_bytes(b"".join(pieces))
    tensors = {
        slot.name: weights[slot.start : slot.stop].reshape(slot.shape) for slot in layout.tensors()
    }
    name = ADAPTER_FILE if config.method == "lora" else MODEL_FILE
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


def theirs(trained: Path, base: Path, config: RunConfig) -> Any:
    """Return the model as transformers and PEFT open it, without dropout."""
    import peft
    import transformers

    lora = config.method == "lora"
    auto = transformers.AutoModelForCausalLM
    if config.task == "classify":
        auto = transformers.AutoModelForSequenceClassification
    tree = transformers.AutoConfig.from_pretrained(base if lora else trained)
    for key in filter(is_dropout, vars(tree)):
        setattr(tree, key, 0.0)
    tree.num_labels = 5
    model: Any = auto.from_pretrained(base if lora else trained, config=tree)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # as documented in docs/models.md
    if lora:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(model, trained, is_trainable=True)
    return model.train()


def their_loss(model: Any, batch: Sequence[Encoded]) -> torch.Tensor:
    """Return the summed loss of samples one by one, from the logits that transformers gives."""
    total = torch.zeros(())
    for sample in batch:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        if isinstance(sample.labels, int):
            model.config.pad_token_id = 10**6  # no token: the last one is the sample's last
            logits = model(input_ids=ids, use_cache=False).logits
            total = total + F.cross_entropy(logits.float(), torch.tensor([sample.labels]))
            continue
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        wanted = torch.from_numpy(sample.labels[1:].astype(np.int64))
        total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    return total


def their_gradient(model: Any, layout: GradientLayout) -> np.ndarray:
    """Return the gradient as the layout orders it."""
    found = {
        name.replace(".default", "").replace(".modules_to_save", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    parts = [
        found[name].grad.numpy().reshape(-1)
        for block in layout.blocks
        for name, _, _ in block.parameters
    ]
    assert len(parts) == len(found)
    return np.concatenate(parts)


@pytest.mark.parametrize("model_type", OTHERS)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("task", ["causal-lm", "classify"])
def test_gradients_and_files_are_those_of_transformers_and_peft(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    make_batch: MakeBatch,
    tmp_path: Path,
    model_type: str,
    method: str,
    task: str,
) -> None:
    folder = tiny_model(model_type, tie_word_embeddings=model_type != "granite")
    config = make_config(folder, task=task, method=method)
    if task == "classify" and not FAMILIES[model_type].classifier:
        with pytest.raises(InputError, match="transformers has no classifier"):
            build_layout(folder, config)
        return
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    model = theirs(write_trained(tmp_path / "out", folder, config, layout, weights), folder, config)
    batch = make_batch(6, task)
    loss = their_loss(model, batch)
    loss.backward()
    replica, _ = start(folder, config)
    mine, found, _ = gradient(replica, batch)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert relative(mine, their_gradient(model, layout)) < 1e-5
    assert replica.evaluate(batch).loss_sum == pytest.approx(loss.item(), rel=1e-5)
