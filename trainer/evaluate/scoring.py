"""How good a trained model is on a data file, as one object."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.trained_model import Trained
from trainer.config.run import Backend
from trainer.data.metrics import accuracy, add_confusion, matthews, mean_loss
from trainer.data.tokens import load_dataset

_PORTION = 256  # samples between two reports of progress


@dataclass(frozen=True)
class Scores:
    """Figures over a whole file; those of another task are None."""

    task: str
    count: int
    """Samples."""
    weight: int
    """What the loss is a mean over: samples, or valid target tokens."""
    loss: float
    accuracy: float | None = None
    mcc: float | None = None
    confusion: list[list[int]] | None = None
    """Counts as `confusion[label][prediction]`."""
    perplexity: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what `trainer evaluate --json` prints, without figures of another task.

        A loss that is not finite becomes null: JSON has no NaN.
        """
        tree: dict[str, Any] = {"schema": "motley.scores/1"}
        for name, value in vars(self).items():
            if value is None:
                continue
            finite = not isinstance(value, float) or math.isfinite(value)
            tree[name] = value if finite else None
        if self.confusion is not None:
            tree["classes"] = [
                {"label": label, **figures} for label, figures in enumerate(self._classes())
            ]
        return tree

    def _classes(self) -> list[dict[str, float | int]]:
        assert self.confusion is not None
        columns = [sum(column) for column in zip(*self.confusion, strict=True)]
        return [
            {
                "count": sum(row),
                "precision": row[label] / columns[label] if columns[label] else 0.0,
                "recall": row[label] / sum(row) if sum(row) else 0.0,
            }
            for label, row in enumerate(self.confusion)
        ]


def score(
    trained: Trained,
    data: Path,
    backend: Backend = "cpu",
    gpu: str = "",
    threads: int | None = None,
    on_open: Callable[[str, str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Evaluate a trained model on a JSON Lines file.

    Args:
        on_open: called with the device that was taken, and why not an earlier one.
        on_progress: called with the samples done and all of them.

    Raises:
        InputError: the data, the tokenizer or the model cannot be used.
    """
    config = trained.config
    tokenizer_dir = trained.base_dir
    samples = load_dataset(
        data, tokenizer_dir, config.task, config.num_classes, config.data.max_seq_len
    )
    from trainer.replica.backend import choose  # seconds of import, after the cheap checks

    choice = choose(backend, gpu, trained.base_dir, config, trained.layout, threads)
    replica = choice.replica
    replica.write_trainable(trained.weights)
    if on_open is not None:
        on_open(replica.device, choice.reason)
    loss_sum, weight = 0.0, 0
    confusion: list[list[int]] | None = None
    for start in range(0, len(samples), _PORTION):
        stop = min(start + _PORTION, len(samples))
        part = replica.evaluate([samples[index] for index in range(start, stop)])
        loss_sum += part.loss_sum
        weight += part.weight
        if part.confusion is not None:
            confusion = add_confusion(confusion, part.confusion) if confusion else part.confusion
        if on_progress is not None:
            on_progress(stop, len(samples))
    loss = mean_loss(loss_sum, weight)
    if confusion is None:
        return Scores(config.task, len(samples), weight, loss, perplexity=_exp(loss))
    return Scores(
        config.task,
        len(samples),
        weight,
        loss,
        accuracy=accuracy(confusion),
        mcc=matthews(confusion),
        confusion=confusion,
    )


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
