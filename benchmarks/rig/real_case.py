"""One fine-tune of SmolLM2-135M for a benchmark: what it reads, and how its replica is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rig.real_data import DATA, cut
from trainer.config.run import load
from trainer.data.metrics import class_scores
from trainer.data.tokens import Dataset, Encoded
from trainer.replica.torch import objective
from trainer.replica.torch.replica import TorchReplica
from trainer.run.inputs import RunInputs, read_inputs

ROWS = 12
"""Of a step."""


class Judge(TorchReplica):
    """A replica that also says what it would answer."""

    def right(self, batch: Sequence[Encoded]) -> dict[str, float]:
        """Return the share of `answers` that are right in every token, and of all `tokens`.

        An answer whose tokens all are the first choice after those before them is the one that
        greedy decoding gives.
        """
        answers = tokens = hits = 0
        with torch.no_grad():
            for micro, _ in self._micro_batches(batch, None):
                chosen, count = objective.language(
                    self._model, micro, self._autocast, losses=_first_choices
                )
                assert micro.targets is not None
                found: Any = chosen  # no sums: which first choices are right
                wrong = set(micro.targets.rows[~found].tolist())
                answers += len(set(micro.targets.rows.tolist()) - wrong)
                tokens, hits = tokens + count, hits + int(found.sum())
        return {"answers": answers / len(batch), "tokens": hits / tokens}

    def score(self, data: str, held_out: Dataset) -> dict[str, float]:
        """Return loss and score on the held-out rows of one of `DATA`."""
        rows = [held_out[index] for index in range(len(held_out))]
        found = self.evaluate(rows)
        scores = class_scores(found.confusion) if found.confusion else self.right(rows)
        return {"loss": found.loss_sum / found.weight, "score": scores[DATA[data].score]}


def _first_choices(hidden: Tensor, head: Tensor, wanted: Tensor, *_: Any) -> Any:
    return (hidden @ head.t()).argmax(-1) == wanted


def real_inputs(
    data: str, layers: int, steps: int, model: Path, work: Path, settings: Mapping[str, Any]
) -> RunInputs:
    """Return what so many steps of `ROWS` rows read, an epoch.

    Args:
        data: one of `DATA`.
        layers: of the model, its first and last.
        work: where data and the cut model are kept.
        settings: of the run, beside the data's.
    """
    source = DATA[data]
    train_file, held_out = source.write(work / data, steps * ROWS)
    given = {
        "output": str(work / "output"),
        "model.path": str(cut(model, work / f"layers-{layers}", layers)),
        "data.train": str(train_file),
        "data.validation": str(held_out),
        "training.batch_size": ROWS,
        "training.max_steps": steps,
        **source.settings,
        **settings,
    }
    return read_inputs(load(None, given), "benchmark")
