"""A small classifier by token counts, in NumPy: a thousand steps on the demo's data in seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.tokens import Encoded
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.replica.base import EvalResult, OnBlock, StepResult

VOCABULARY, HIDDEN, CLASSES = 1024, 64, 5
SHAPES = {
    "up": (HIDDEN, VOCABULARY),
    "up_bias": (HIDDEN,),
    "down": (CLASSES, HIDDEN),
    "down_bias": (CLASSES,),
}


class TokenBag:
    """Logarithms of counts `[V]`, a hidden layer `[H]` of ReLU, and classes `[C]`; a Replica."""

    device = "cpu"

    def __init__(self, seed: int) -> None:
        slots: list[TensorSlot] = []
        for name, shape in SHAPES.items():
            slots.append(TensorSlot(name, shape, slots[-1].stop if slots else 0))
        block = Block(0, "layers.0", 0, slots[-1].stop, tuple(slots))
        self.layout = GradientLayout((block,), 1)
        self._weights = np.zeros(self.layout.size, np.float32)
        self._gradient = np.zeros_like(self._weights)
        draw = np.random.default_rng(seed)
        for slot in slots:
            if len(slot.shape) > 1:
                drawn = draw.standard_normal(slot.size) / np.sqrt(slot.shape[1])
                self._weights[slot.start : slot.stop] = drawn
        self.start = self._weights.copy()
        """The weights that a run begins with, fp32 `[N]`."""

    def write_trainable(self, flat: np.ndarray) -> None:
        """Copy fp32 `[N]` into the weights."""
        self._weights[...] = flat

    def forward_backward(
        self, batch: Sequence[Encoded], on_block: OnBlock, alpha: float | None = None
    ) -> StepResult:
        """Hand out the gradient of the summed cross-entropy; see `Replica.forward_backward`."""
        del alpha
        counts, labels = _read(batch)
        hidden, logits = self._forward(counts)
        rows = np.arange(len(batch))
        logs = _log_softmax(logits)
        loss, chance = -float(logs[rows, labels].sum()), np.exp(logs)
        chance[rows, labels] -= 1
        up, up_bias, down, down_bias = self._views(self._gradient)
        np.matmul(chance.T, hidden, out=down)
        np.sum(chance, axis=0, out=down_bias)
        back = (chance @ self._views(self._weights)[2]) * (hidden > 0)
        np.matmul(back.T, counts, out=up)
        np.sum(back, axis=0, out=up_bias)
        on_block(0, self._gradient)
        return StepResult(loss, len(batch), sum(len(each.input_ids) for each in batch), 0.0)

    def evaluate(self, batch: Sequence[Encoded]) -> EvalResult:
        """Return the summed loss and the confusion; see `Replica.evaluate`."""
        counts, labels = _read(batch)
        logits = self._forward(counts)[1]
        loss = -float(_log_softmax(logits)[np.arange(len(batch)), labels].sum())
        confusion = np.zeros((CLASSES, CLASSES), int)
        np.add.at(confusion, (labels, logits.argmax(1)), 1)
        return EvalResult(loss, len(batch), confusion.tolist())

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Raise NotImplementedError: it is no language model."""
        raise NotImplementedError(prompts, new_tokens, stop)

    def _forward(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        up, up_bias, down, down_bias = self._views(self._weights)
        hidden = np.maximum(counts @ up.T + up_bias, 0)
        return hidden, hidden @ down.T + down_bias

    def _views(self, flat: np.ndarray) -> list[np.ndarray]:
        return [flat[slot.start : slot.stop].reshape(slot.shape) for slot in self.layout.tensors()]


def _read(batch: Sequence[Encoded]) -> tuple[np.ndarray, np.ndarray]:
    counts = [np.bincount(each.input_ids, minlength=VOCABULARY) for each in batch]
    found = np.log1p(np.array(counts, np.float32).reshape(len(batch), VOCABULARY))
    return found, np.array([each.labels for each in batch], int)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    lower = logits - logits.max(1, keepdims=True)
    return lower - np.log(np.exp(lower).sum(1, keepdims=True))
