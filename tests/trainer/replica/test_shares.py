"""Shares of a batch, however it is cut, have the gradient of the whole: a row for each setting."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.trainer.replica.driving import gradient, relative

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "A frozen": {"lora__freeze_a": True},
    "some layers": {"lora__layers_to_transform": [1]},
    "rsLoRA": {"lora__use_rslora": True},
}
"""What changes a gradient, and is the same on torch and wgpu."""


DORA: dict[str, Any] = {"lora__use_dora": True}
WHOLE: dict[str, Any] = {"lora__modules_to_save": ["lm_head", "embed_tokens"]}
OF_CLASSES: dict[str, dict[str, Any]] = {
    "weights": {"training__class_weights": [1, 2, 3, 40, 5]},
    "smoothing": {"training__label_smoothing": 0.1},
    "both": {"training__class_weights": [7, 1, 1, 2, 9], "training__label_smoothing": 0.3},
}


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        *((task, chosen) for chosen in SETTINGS.values() for task in ("classify", "causal-lm")),
        *(("classify", chosen) for chosen in OF_CLASSES.values()),
        ("causal-lm", DORA),
        ("causal-lm", WHOLE),
        *(("dpo", chosen) for chosen in SETTINGS.values()),
        ("dpo", DORA),
    ],
)
def test_shares_add_up_to_the_whole(tiny: Tiny, task: str, settings: dict[str, Any]) -> None:
    replica, _ = tiny.start(task=task, **settings)
    batch = tiny.batch(7, task)
    whole, expected, _ = gradient(replica, batch)
    for cuts in ((0, 1, 7), (0, 3, 4, 7)):
        shares = [gradient(replica, batch[a:b]) for a, b in pairwise(cuts)]
        assert relative(np.sum([share for share, _, _ in shares], axis=0), whole) < 1e-6
        assert sum(result.weight for _, result, _ in shares) == expected.weight
        losses = sum(result.loss_sum for _, result, _ in shares)
        assert losses == pytest.approx(expected.loss_sum, rel=1e-6)


@pytest.mark.parametrize("chosen", OF_CLASSES.values(), ids=str)
def test_the_mean_loss_is_that_of_torch(tiny: Tiny, chosen: dict[str, Any]) -> None:
    """Of `cross_entropy` with its `weight` and `label_smoothing`; validated is the plain one."""
    import transformers

    folder = tiny.model("qwen3", "classify")
    replica, _ = tiny.start(folder, method="full", **chosen)
    batch = tiny.batch(6)
    mine, result, _ = gradient(replica, batch)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ids = [torch.from_numpy(sample.input_ids.astype(np.int64))[None] for sample in batch]
    logits = torch.cat([model(input_ids=each).logits for each in ids])
    labels = torch.tensor([sample.labels for sample in batch])
    weights = chosen.get("training__class_weights")
    loss = cross_entropy(
        logits,
        labels,
        None if weights is None else torch.tensor(weights, dtype=torch.float32),
        label_smoothing=chosen.get("training__label_smoothing", 0.0),
    )
    assert result.loss_sum / result.weight == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    parameters: dict[str, Any] = dict(model.named_parameters())
    theirs = np.concatenate(
        [parameters[slot.name].grad.numpy().reshape(-1) for slot in replica.layout.iter_tensors()]
    )
    assert relative(mine / result.weight, theirs) < 2e-6
    plain = cross_entropy(logits, labels, reduction="sum").item()
    assert replica.evaluate(batch).loss_sum == pytest.approx(plain, rel=1e-5)
