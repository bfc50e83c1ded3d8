"""Continue prompts with a trained language model, on the first usable backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainer.checkpoint.trained_model import TrainedModel
from trainer.data.prompts import encode_prompts
from trainer.data.shapes import Sample
from trainer.replica.backend import Compute
from trainer.replica.continuation import Until
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError
from trainer.system.process.imports import speed_up_imports

log = logging.getLogger(__name__)


class Generator(Protocol):
    """A language model on one device."""

    @property
    def device(self) -> str:
        """Its device, such as `cpu` or `wgpu:0`."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        until: Until | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, at most `max_new_tokens`.

        A token of `stop` is a sample's last, or one at which `until` says so. A prompt's place in
        the list is its number for `sampling` and `until`. There is at least one prompt, and at
        least one token in each.

        Raises:
            InputError: prompt and new tokens together do not fit.
            NonFiniteError: the model computes NaN or Inf.
        """
        ...


Opener = Callable[[TrainedModel], tuple[Generator, str]]


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt."""

    prompt: str
    """Its text, with the markup of a conversation."""
    text: str
    """Without the token that ended it."""
    tokens: int
    """New tokens, including the one that ended it."""
    ended: bool
    """The model ended it; else it has the requested length."""

    def as_json(self) -> dict[str, Any]:
        """Return what `trainer generate --json` prints of it."""
        return {"schema": "motley.completion/1", **vars(self)}


class TextModel:
    """A trained language model with its tokenizer; `open_generator` loads it.

    Args:
        today: the date for its chat template; None: `data.date`.

    Raises:
        InputError: the model or its tokenizer cannot be used.
    """

    def __init__(self, trained: TrainedModel, today: str | None = None) -> None:
        if trained.config.task != "causal-lm":
            raise InputError(f"{trained.path}: is a classifier, only language models generate")
        self.trained = trained
        self.encoder = trained.open_encoder(today)
        for line in self.encoder.unused:
            log.info("%s", line)
        self._generator: Generator | None = None

    def encode(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return the prompts of texts and conversations.

        Raises:
            InputError: one has no token, or one that the model does not know.
        """
        return encode_prompts(self.encoder, self.trained.base_dir, samples)

    def open_generator(
        self,
        longest: int,
        max_new_tokens: int,
        compute: Compute,
        opener: Opener | None = None,
        *,
        batch: int = 8,
    ) -> tuple[str, str]:
        """Load the model for prompts of up to `longest` tokens.

        Returns the device, and why no earlier one was taken.

        Args:
            batch: the most prompts that are continued together; layers stay beside so many.
            opener: returns the generator and why no earlier device was taken.
        """
        if opener is not None:
            self._generator, reason = opener(self.trained)
        else:
            self._generator, reason = _load_generator(
                self.trained, longest, max_new_tokens, compute, batch
            )
        return self._generator.device, reason

    def complete_prompts(
        self,
        samples: Sequence[Sample],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        on_text: Callable[[int, str], bool] | None = None,
    ) -> list[Completion]:
        """Continue prompts, which `encode` gave for these samples.

        Args:
            on_text: called with a prompt's number and each new piece of its text, which may be
                empty; True ends it.

        Raises:
            InputError: the prompts do not fit.
            NonFiniteError: the model computes NaN or Inf.
        """
        assert self._generator is not None, "the model is not open"
        tokenizer, stops = self.encoder.tokenizer, self.encoder.stops
        asked = list(zip(samples, prompts, strict=True))
        streams = [self.encoder.answer_stream(*each) for each in asked]

        def should_stop(number: int, tokens: Sequence[int]) -> bool:
            stream = streams[number]
            if len(tokens) == 1:  # a batch that did not fit begins again
                stream = streams[number] = self.encoder.answer_stream(*asked[number])
            new = stream.push(tokens)
            return (on_text is not None and on_text(number, new)) or stream.ended

        made = self._generator.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stops,
            until=should_stop
            if on_text is not None or any(each.markers for each in streams)
            else None,
        )
        completions: list[Completion] = []
        for number, (prompt, new) in enumerate(zip(prompts, made, strict=True)):
            stopped = new[-1] in stops
            rest = streams[number].finish(new[:-1] if stopped else new)
            if on_text is not None:
                on_text(number, rest)
            before = tokenizer.decode(list(prompt), skip_special_tokens=False)
            ended = stopped or streams[number].ended
            completions.append(Completion(before, streams[number].text, len(new), ended))
        return completions


def complete_samples(
    trained: TrainedModel,
    samples: Sequence[Sample],
    max_new_tokens: int,
    sampling: Sampling,
    compute: Compute,
    on_open: Callable[[str, str], None] | None = None,
    opener: Opener | None = None,
) -> list[Completion]:
    """Continue texts and conversations, in their order.

    Args:
        on_open: called with the device, and why no earlier one was taken.
        opener: see `TextModel.open_generator`.

    Raises:
        InputError: the model, its tokenizer or the prompts cannot be used, or do not fit.
        NonFiniteError: the model computes NaN or Inf.
    """
    model = TextModel(trained)
    prompts = model.encode(samples)
    longest = max(len(prompt) for prompt in prompts)
    batch = min(8, len(prompts))
    found = model.open_generator(longest, max_new_tokens, compute, opener, batch=batch)
    if on_open is not None:
        on_open(*found)
    return model.complete_prompts(samples, prompts, max_new_tokens, sampling)


def _load_generator(
    trained: TrainedModel, longest: int, max_new_tokens: int, compute: Compute, batch: int
) -> tuple[Generator, str]:
    """Return a generator on the first usable backend, and why no earlier one was taken."""
    from trainer.replica.backend import (
        UnusableError,
        check_vulkan_computes,
        find_cuda_device,
        first_usable,
        open_vulkan_device,
    )

    length = longest + max_new_tokens
    data = trained.config.data.model_copy(update={"max_seq_len": length})
    config = compute.apply_storage(trained.config.model_copy(update={"data": data}))
    trained = replace(trained, config=config)

    def load_on_torch(device: str) -> Generator:
        with speed_up_imports("torch"):
            from trainer.replica.torch.generator import load_generator
        return load_generator(
            trained.base_dir,
            trained.config,
            trained.layout,
            trained.weights,
            device,
            compute.threads,
            batch=batch,
        )

    def load_on_vulkan() -> Generator:
        check_vulkan_computes(trained.base_dir, config)
        device = open_vulkan_device(compute.gpu, allow_software=compute.backend == "wgpu")
        from trainer.replica.wgpu.generation.generator import load_generator
        from trainer.replica.wgpu.gpu.errors import DeviceError

        try:
            return load_generator(
                trained.base_dir,
                config,
                trained.layout,
                trained.weights,
                device,
                longest=longest,
                max_new_tokens=max_new_tokens,
                batch=batch,
            )
        except (DeviceError, InputError) as error:
            raise UnusableError(str(error)) from None

    generator, _, reason = first_usable(
        compute.backend,
        compute.gpu,
        {
            "cuda": lambda: load_on_torch(find_cuda_device(compute.gpu)),
            "wgpu": load_on_vulkan,
            "cpu": lambda: load_on_torch("cpu"),
        },
    )
    return generator, reason
