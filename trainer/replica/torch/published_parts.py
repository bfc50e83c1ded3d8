"""The layers of a model of transformers, one by one, as `LayerMajorOrder` runs them.

The class's own loop is never copied. A pass whose layers hand on what they get shows what each
layer is called with; one whose last layer hands on given hidden states computes what follows it.
That is the model where the loop passes nothing else from layer to layer, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.model import find_backbone, list_layers
from trainer.replica.torch.objective import last_hidden

_PROBE = 12
"""Tokens of the check."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments of layers that a call cannot change."""
_OTHER_INPUT = "a layer's input is not the output of the one before it"
_MORE = "layers pass on more than hidden states"


class InseparableLayersError(Exception):
    """Layers that do not run one by one; its text says why."""


class PublishedParts:
    """Embedding, layers and the rest of a model; see `layer_major.Parts`.

    Raises:
        InseparableLayersError: the model is more than its layers one after the other.
    """

    def __init__(self, model: Any, autocast: torch.autocast) -> None:
        self._model = model
        self.layers: Sequence[Any] = list(list_layers(model))
        self._returns: Callable[[Tensor], Any] = lambda hidden: hidden
        with autocast:
            try:
                self.trains_embedding = self._check_loop()
            except InseparableLayersError as error:
                if str(error) not in (_OTHER_INPUT, _MORE):
                    raise
                self._returns = lambda hidden: (hidden,)  # as of layers that may return more
                self.trains_embedding = self._check_loop()

    def embed_tokens(self, micro: MicroBatch) -> tuple[Tensor, list[Any]]:
        """Return the first layer's input `[B, T, D]`, and the other arguments of each layer.

        Raises:
            InseparableLayersError: see the class.
        """
        handed: list[Tensor] = []
        calls: list[Any] = []

        def hand_on(number: int, *given: Any, **more: Any) -> Any:
            hidden, *rest = given or [more.pop("hidden_states", None)]
            if number != len(calls):
                _refuse("layers do not run once each, in their order")
            if number and hidden is not handed[-1]:
                _refuse(_OTHER_INPUT)
            _check_arguments(number, (*rest, *more.values()))
            calls.append((rest, more))
            handed.append(hidden.view_as(hidden))
            return self._returns(handed[-1])

        with _replace_layers(self.layers, hand_on):
            self._run_backbone(micro)
        if len(calls) != len(self.layers):
            _refuse("layers do not run once each, in their order")
        return handed[0], calls

    def run_layer(self, number: int, hidden: Tensor, call: Any) -> Tensor:
        """Return a layer's output `[B, T, D]`.

        Args:
            call: of `embed_tokens`, for this layer.
        """
        rest, more = call
        found = self.layers[number](hidden, *rest, **more)
        return found if isinstance(found, Tensor) else found[0]

    def run_remainder(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """Return the final hidden states `[B, T, D]` from the last layer's output."""

        def hand_on(number: int, *given: Any, **more: Any) -> Any:
            is_last = number == len(self.layers) - 1
            return self._returns(hidden if is_last else (given or [more["hidden_states"]])[0])

        with _replace_layers(self.layers, hand_on):
            return self._run_backbone(micro)

    def _run_backbone(self, micro: MicroBatch) -> Tensor:
        return last_hidden(self._model, micro.input_ids, micro.positions)

    def _check_loop(self) -> bool:
        """Return whether what is before the layers trains.

        Raises:
            InseparableLayersError: see the class.
        """
        device = next(find_backbone(self._model).parameters()).device
        ids = torch.arange(1, 1 + _PROBE, device=device)[None]
        one, other = (MicroBatch(each, each, each) for each in (ids, ids + 1))
        try:
            hidden, _ = self.embed_tokens(one)
            with torch.no_grad():
                found = [self.run_remainder(hidden, each) for each in (one, other)]
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            _refuse(_MORE)
        if not torch.equal(*found):
            _refuse("what follows the layers takes more than the last one's output")
        return hidden.requires_grad


def _refuse(why: str) -> NoReturn:
    raise InseparableLayersError(why)


def _check_arguments(number: int, given: tuple[Any, ...]) -> None:
    for each in tree_leaves(given, is_leaf=lambda part: isinstance(part, (dict, list))):
        if not isinstance(each, (Tensor, *_PLAIN)):
            _refuse(f"layer {number} gets a {type(each).__name__}, which others may change")
        if isinstance(each, Tensor) and each.requires_grad:
            _refuse(f"layer {number} gets more than hidden states that has a gradient")


@contextmanager
def _replace_layers(layers: Sequence[Any], stand_in: Callable[..., Any]) -> Iterator[None]:
    """Let a function be called in place of layers, with their number before their arguments."""
    own = [
        {
            key: vars(layer).pop(key)
            for key in ("forward", "_compiled_call_impl")
            if key in vars(layer)
        }
        for layer in layers
    ]
    for number, layer in enumerate(layers):
        layer.forward = partial(stand_in, number)
    try:
        yield
    finally:
        for layer, kept in zip(layers, own, strict=True):
            del layer.forward
            vars(layer).update(kept)
