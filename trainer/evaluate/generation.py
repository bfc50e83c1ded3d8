"""Continue prompts with a trained language model, on the first usable backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from trainer.checkpoint.trained_model import Trained
from trainer.config.run import Backend
from trainer.data.encoder import Encoder
from trainer.data.shapes import Sample
from trainer.model.architecture import read_architecture
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_headers
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError
from trainer.system.process.imports import importing

if TYPE_CHECKING:
    from trainer.replica.wgpu.gpu.device import Device


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
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, at most `max_new_tokens`.

        A token of `stop` is a sample's last. A prompt's place in the list is its number for
        `sampling`. There is at least one prompt, and at least one token in each.

        Raises:
            InputError: prompt and new tokens together do not fit.
            NonFiniteError: the model computes NaN or Inf.
        """
        ...


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


def complete(
    trained: Trained,
    samples: Sequence[Sample],
    max_new_tokens: int,
    sampling: Sampling,
    backend: Backend = "auto",
    gpu: str = "",
    threads: int | None = None,
    on_open: Callable[[str, str], None] | None = None,
    opener: Callable[[Trained], tuple[Generator, str]] | None = None,
) -> list[Completion]:
    """Continue texts and conversations, in their order.

    Args:
        on_open: called with the device, and why no earlier one was taken.
        opener: returns the generator and why no earlier device was taken; None: of `backend`.

    Raises:
        InputError: the model, its tokenizer or the prompts cannot be used, or do not fit.
        NonFiniteError: the model computes NaN or Inf.
    """
    if trained.config.task != "causal-lm":
        raise InputError(f"{trained.path}: is a classifier, only language models generate")
    encoder = Encoder(trained.base_dir)
    prompts = [encoder.prompt(sample) for sample in samples]
    known = read_architecture(trained.base_dir).vocab_size
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InputError(f"prompt {number} has no token to continue")
        if max(prompt) >= known:
            raise InputError(
                f"{trained.base_dir}: the tokenizer gives token {max(prompt)} of prompt {number},"
                f" the model has {known}"
            )
    stop = encoder.stops
    if opener is not None:
        generator, reason = opener(trained)
    else:
        longest = max(len(prompt) for prompt in prompts)
        generator, reason = _open(trained, longest, max_new_tokens, backend, gpu, threads)
    if on_open is not None:
        on_open(generator.device, reason)
    made = generator.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
    completions: list[Completion] = []
    for prompt, new in zip(prompts, made, strict=True):
        ended = new[-1] in stop
        asked = encoder.tokenizer.decode(prompt, skip_special_tokens=False)
        text = encoder.tokenizer.decode(new[:-1] if ended else new, skip_special_tokens=False)
        completions.append(Completion(asked, text, len(new), ended))
    return completions


def _open(
    trained: Trained,
    longest: int,
    max_new_tokens: int,
    backend: Backend,
    gpu: str,
    threads: int | None,
) -> tuple[Generator, str]:
    """Return a generator on the first usable backend, and why no earlier one was taken."""
    from trainer.replica.backend import (
        check_vulkan_computes,
        cuda_device,
        first_usable,
        vulkan_device,
    )

    length = longest + max_new_tokens
    data = trained.config.data.model_copy(update={"max_seq_len": length})
    trained = replace(trained, config=trained.config.model_copy(update={"data": data}))

    def torch_on(device: str) -> Generator:
        with importing("torch"):
            from trainer.replica.torch.generator import load_generator
        return load_generator(
            trained.base_dir, trained.config, trained.layout, trained.weights, device, threads
        )

    def vulkan() -> Generator:
        check_vulkan_computes(trained.base_dir, trained.config)
        device = vulkan_device(gpu, allow_software=backend == "wgpu")
        return _on_vulkan(trained, device, longest, max_new_tokens)

    generator, _, reason = first_usable(
        backend,
        gpu,
        {
            "cuda": lambda: torch_on(cuda_device(gpu)),
            "wgpu": vulkan,
            "cpu": lambda: torch_on("cpu"),
        },
    )
    return generator, reason


def _on_vulkan(trained: Trained, device: Device, longest: int, max_new_tokens: int) -> Generator:
    """Load a model with positions for a prompt of `longest` tokens and the new ones.

    A full model is loaded frozen: in its stored floats, without gradients.
    """
    from trainer.replica.backend import UnusableError
    from trainer.replica.wgpu.generation.generator import WgpuGenerator, slots_for
    from trainer.replica.wgpu.gpu.errors import DeviceError
    from trainer.replica.wgpu.loaded import load

    config, layout = trained.config, trained.layout
    data = config.data.model_copy(update={"max_seq_len": slots_for(longest, max_new_tokens)})
    config = config.model_copy(update={"data": data})
    if config.method == "full":
        kinds = {header.dtype for header in read_headers(trained.base_dir).values()}
        dtype = "bfloat16" if kinds == {"BF16"} else "float32"
        model = config.model.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"method": "lora", "model": model})
        layout = GradientLayout((), layout.num_layers)
    try:
        loaded = load(trained.base_dir, config, layout, device)
        if layout.blocks:
            loaded.write(device, trained.weights)
    except DeviceError as error:
        raise UnusableError(str(error)) from None
    return WgpuGenerator(device, loaded.decoder)
