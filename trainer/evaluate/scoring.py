"""Figures of a trained model on a data file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.checkpoint.trained_model import TrainedModel
from trainer.data.encoded_rows import read_data
from trainer.data.samples import columns_of_run, hash_files
from trainer.replica.backend import Compute
from trainer.replica.base import EvalResult
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

log = logging.getLogger(__name__)

_PORTION = 256  # samples between two reports of progress


@dataclass(frozen=True)
class EvaluationScores:
    """Figures over a whole file; those of other tasks are None."""

    task: str
    count: int
    """Samples."""
    weight: int
    """The number of loss terms: samples, or valid target tokens."""
    loss: float
    accuracy: float | None = None
    mcc: float | None = None
    confusion: list[list[int]] | None = None
    """Counts as `confusion[label][prediction]`."""
    names: tuple[str, ...] | None = None
    """Names of the classes, if they have some."""
    perplexity: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what `trainer evaluate --json` prints, without other tasks' figures.

        A loss that is not finite becomes null: JSON has no NaN.
        """
        tree: dict[str, Any] = {"schema": "motley.scores/1"}
        for name, value in vars(self).items():
            if value is None or name == "names":
                continue
            finite = not isinstance(value, float) or math.isfinite(value)
            tree[name] = value if finite else None
        if self.confusion is not None:
            tree["classes"] = self._compute_class_metrics()
        return tree

    def _compute_class_metrics(self) -> list[dict[str, float | int | str]]:
        assert self.confusion is not None
        columns = [sum(column) for column in zip(*self.confusion, strict=True)]
        return [
            {
                "label": label,
                **({} if self.names is None else {"name": self.names[label]}),
                "count": sum(row),
                "precision": row[label] / columns[label] if columns[label] else 0.0,
                "recall": row[label] / sum(row) if sum(row) else 0.0,
            }
            for label, row in enumerate(self.confusion)
        ]


class Evaluator(Protocol):
    """A trained model that computes losses; see `Replica`."""

    @property
    def device(self) -> str:
        """Its device."""
        ...

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass."""
        ...


def score_file(
    trained: TrainedModel,
    data: Path,
    compute: Compute,
    on_open: Callable[[str, str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    held_out: bool = False,
    opener: Callable[[TrainedModel], tuple[Evaluator, str]] | None = None,
) -> EvaluationScores:
    """Evaluate a trained model on a data file.

    Args:
        columns: the data's names of keys; None: those of the run, if the data has them.
        held_out: only on the part of its training data that its run held out.
        on_open: called with the device, and why no earlier one was taken.
        on_progress: called with the samples done and all of them.
        opener: returns what evaluates and why no earlier device was taken; None: of `compute`.

    Raises:
        InputError: the data, the tokenizer or the model cannot be used.
    """
    # Without gradients no activation is kept, which is what recomputation needs.
    config = trained.config.with_settings({"training.gradient_checkpointing": "on"})
    trained = replace(trained, config=config)
    if columns is None:
        columns = config.data.columns
        columns = columns if held_out else columns_of_run(data, columns)
    config = config.with_settings({"data.columns": dict(columns)})
    encoder = trained.open_encoder()
    fraction = _held_out_fraction(trained, data) if held_out else 0.0
    file = read_data(str(data), config, encoder, fraction)
    assert file is not None
    if fraction:
        file = file.hold_out(fraction)[1]
    for line in (*file.unused, *encoder.unused):
        log.info("%s", line)
    samples = file.open_dataset(encoder, config.task, config.data.max_seq_len)
    if opener is not None:
        replica, reason = opener(trained)
    else:
        from trainer.replica.backend import (
            choose_replica,
        )  # seconds of import, after the cheap checks

        choice = choose_replica(
            compute.backend,
            compute.gpu,
            trained.base_dir,
            compute.apply_storage(config),
            trained.layout,
            compute.threads,
            evaluates=True,
        )
        replica, reason = choice.replica, choice.reason
        if trained.weights is not None:
            choice.replica.write_trainable(trained.weights)
    if on_open is not None:
        on_open(replica.device, reason)
    parts: list[EvalResult] = []
    for start in range(0, len(samples), _PORTION):
        stop = min(start + _PORTION, len(samples))
        parts.append(replica.evaluate([samples[index] for index in range(start, stop)]))
        if on_progress is not None:
            on_progress(stop, len(samples))
    total = EvalResult.sum_parts(parts)
    scores = total.compute_scores()
    assert scores["loss"] is not None, "data without anything to learn is refused"
    return EvaluationScores(
        config.task,
        len(samples),
        total.weight,
        names=config.class_names,
        perplexity=None if total.confusion else _saturate_exp(scores["loss"]),
        **scores,
    )


def _held_out_fraction(trained: TrainedModel, data: Path) -> float:
    """Return the fraction of its training data that a run held out, as its checkpoint records."""
    progress = trained.progress
    if progress is None:
        raise InputError(
            f"{trained.path}: is not a checkpoint, and only a checkpoint records the held-out "
            "part of its run; give the run's output folder"
        )
    fraction = (progress.config.get("data") or {}).get("validation_fraction")
    if not fraction:
        raise InputError(
            f"{trained.path}: its run has no held-out part (data.validation_fraction is 0); give "
            "data"
            " that it was not trained on, without --held-out"
        )
    if hash_files([data]).hexdigest() != progress.data_digest:
        raise InputError(
            f"{data}: is not the file that the run was trained on, so its held-out part is "
            "unknown; give that file, unchanged"
        )
    return fraction


def _saturate_exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
