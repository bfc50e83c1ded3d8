"""Generation with a cache against transformers: the same tokens, the logits of whole forwards."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.covering import covering
from tests.trainer.replica.driving import gradient, relative
from tests.trainer.replica.torch.test_streaming import FORMATS
from trainer.config.run import Resident, RunConfig
from trainer.model.initialization import draw_uniform, initial_weights
from trainer.model.layout import build_layout
from trainer.planning.vulkan import USABLE
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.replica.torch.model import flatten_parameters
from trainer.replica.torch.published_model import load_published
from trainer.replica.wgpu import loaded_model
from trainer.replica.wgpu.generation import generator
from trainer.replica.wgpu.generation.generator import WgpuGenerator
from trainer.replica.wgpu.generation.recorded_step import StepShape, choose_shape, record_step
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import OutOfMemoryError
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.loaded_model import load_model
from trainer.system.errors import InputError, NonFiniteError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

GREEDY = Sampling()
POSITIONS = 256
NEW = 6


def prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 300, length).tolist() for length in lengths]


class Both:
    """The same weights on the device and in transformers on the CPU."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        device: Device,
        on_torch: RunConfig | None = None,
        **settings: Any,
    ) -> None:
        """Load both; `on_torch` is for what torch is to do otherwise."""
        layout = build_layout(folder, config)
        weights = initial_weights(layout, folder, config)
        for slot in layout.iter_tensors():
            if slot.name.endswith("lora_B.weight"):  # zeros would hide the adapter
                weights[slot.start : slot.stop] = draw_uniform(5, slot.name, slot.size, 0.5)
        self.loaded = load_model(folder, config, layout, device)
        self.layout = layout
        self.loaded.write(device, weights)
        self.generator = WgpuGenerator(device, self.loaded.decoder, **settings)
        self.torch: Any = load_published(folder, on_torch or config, torch.device("cpu"))
        flatten_parameters(self.torch, layout, torch.device("cpu")).copy_(torch.tensor(weights))

    def greedy(self, prompt: Sequence[int], count: int = NEW) -> list[int]:
        """Return what transformers generates."""
        ids = torch.tensor([prompt])
        made = self.torch.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        return made[0, len(prompt) :].tolist()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return those of a forward without a cache, `[T, V]`."""
        with torch.no_grad():
            return self.torch(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


@pytest.fixture
def both(device: Device, tiny: Tiny) -> Any:
    def make(
        model_type: str = "qwen3", method: str = "lora", base: str = "float32", **settings: Any
    ) -> Both:
        dtype = "bfloat16" if base == "bfloat16" else "float32"
        folder = tiny.model(model_type, dtype=dtype, tie_word_embeddings=model_type != "llama")
        config, widened = (
            tiny.config(
                folder,
                task="causal-lm",
                method=method,
                data__max_seq_len=POSITIONS,
                **({"lora__lora_rank": 4} if method == "lora" else {}),
                model__quantization="nf4" if base == "nf4" else "none",
                model__dtype=kept,
            )
            for kept in (dtype, "float32")  # torch would compute in bfloat16, too
        )
        return Both(folder, config, device, widened, **settings)

    return make


@pytest.mark.parametrize(
    ("model_type", "method", "base"),
    [
        *((model_type, "lora", "float32") for model_type in ("qwen3", "qwen2", "llama", "smollm3")),
        *((model_type, "full", "float32") for model_type in ("qwen3", "qwen2")),
        *(("qwen3", "lora", base) for base in ("bfloat16", "nf4")),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    both: Any, model_type: str, method: str, base: str
) -> None:
    models = both(model_type, method, base)
    asked = prompts(3, 20, 1)
    made = models.generator.generate(asked, max_new_tokens=NEW, sampling=GREEDY)
    assert made == [models.greedy(prompt) for prompt in asked]


class Forced:
    """Takes the tokens that it is told to, and keeps the logits that it is shown."""

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        self._tokens = tokens
        self.seen: dict[tuple[int, int], np.ndarray] = {}

    def choose_tokens(self, logits: np.ndarray, samples: Sequence[int], place: int) -> np.ndarray:
        for row, sample in zip(logits, samples, strict=True):
            self.seen[sample, place] = row
        return np.array([self._tokens[sample][place] for sample in samples])


@pytest.mark.parametrize(
    ("model_type", "base", "tolerance"),
    [
        *((model_type, "float32", 1e-5) for model_type in ("qwen3", "qwen2", "llama")),
        *((model_type, "bfloat16", 1e-5) for model_type in ("qwen3", "llama")),
        *((model_type, "nf4", 1e-4) for model_type in ("qwen3", "llama")),
    ],
)
def test_logits_of_every_cached_step_are_those_of_a_whole_forward(
    both: Any, model_type: str, base: str, tolerance: float
) -> None:
    """The longest prompt takes two pieces; three samples in batches of two leave a row unused."""
    models = both(model_type, base=base, batch=2)
    asked, told = prompts(140, 17, 2), prompts(3, 3, 3)
    forced = Forced(told)
    models.generator.generate(asked, max_new_tokens=3, sampling=forced)
    assert len(forced.seen) == 9
    for sample, (prompt, tokens) in enumerate(zip(asked, told, strict=True)):
        whole = models.logits([*prompt, *tokens])
        for place in range(3):
            expected = whole[len(prompt) - 1 + place]
            assert relative(forced.seen[sample, place], expected) < tolerance, (sample, place)


def test_a_token_crosses_the_bus_once_each_way(both: Any, device: Device) -> None:
    models = both()

    def crossed(count: int) -> tuple[int, int]:
        before = device.counters.uploads, device.counters.readbacks
        models.generator.generate(prompts(4, 9), max_new_tokens=count, sampling=GREEDY)
        return device.counters.uploads - before[0], device.counters.readbacks - before[1]

    assert crossed(1) == (1, 1)
    assert crossed(5) == (5, 5)


def test_draws_depend_neither_on_batches_nor_on_calls(both: Any) -> None:
    sampling = Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=4)
    asked = prompts(5, 9, 30)
    found = []
    for batch in (3, 1):
        generator = both(batch=batch).generator
        for _ in range(2):
            found.append(generator.generate(asked, max_new_tokens=NEW, sampling=sampling))
    assert found == found[:1] * 4
    other = Sampling(temperature=1.5, seed=5)
    assert generator.generate(asked, max_new_tokens=NEW, sampling=other) != found[0]


def test_a_stop_token_ends_its_sample_alone(both: Any) -> None:
    generator = both().generator
    asked = prompts(6, 12)
    free = generator.generate(asked, max_new_tokens=NEW, sampling=GREEDY)
    stop = next(token for token in free[0] if token not in free[1])
    cut = free[0][: free[0].index(stop) + 1]
    made = generator.generate(asked, max_new_tokens=NEW, sampling=GREEDY, stop=frozenset({stop}))
    assert made == [cut, free[1]]


def test_nan_weights_are_told(both: Any, device: Device) -> None:
    models = both()
    weights = np.zeros(models.layout.size, np.float32)
    weights[17] = np.nan
    models.loaded.write(device, weights)
    with pytest.raises(NonFiniteError, match=r"sample 1: NaN or Inf .* new token 0"):
        models.generator.generate(prompts(2, 8), max_new_tokens=2, sampling=GREEDY)


@pytest.mark.parametrize(
    ("form", "waiting"), covering(product(("fp32", "bf16", "nf4"), (384, 256, 0)))
)
def test_each_layer_takes_the_chunks_of_prompts_before_the_next_is_read(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, form: str, waiting: int
) -> None:
    """The longest prompt and its new tokens fill all slots; others are shorter than a chunk."""
    dtype, stored = FORMATS[form]
    folder = tiny.model(dtype=dtype, num_hidden_layers=4, tie_word_embeddings=form == "fp32")
    config = tiny.config(folder, task="causal-lm", lora__lora_rank=4, **stored)
    layout, asked = build_layout(folder, config), prompts(17, 382, 140, 2, 256)
    weights, read = initial_weights(layout, folder, config), list[int]()

    def find_logits(resident: Resident) -> tuple[list[list[int]], dict[tuple[int, int], bytes]]:
        used = Compute(resident=resident).apply_storage(config)
        made = generator.load_generator(
            folder, used, layout, weights, device, longest=382, max_new_tokens=2, batch=2
        )
        if made._uploads is not None:
            hold = made._uploads.feed.hold

            def hold_and_count(layer: int, following: int | None) -> int:
                read.append(layer)
                return hold(layer, following)

            monkeypatch.setattr(made._uploads.feed, "hold", hold_and_count)
        forced: Any = Forced(prompts(2, 2, 2, 2, 2))
        answers = made.generate(asked, max_new_tokens=2, sampling=forced)
        return answers, {place: logits.tobytes() for place, logits in forced.seen.items()}

    def choose_waiting(batch: int, longest: int, slots: int, *, waits: bool) -> StepShape:
        shape = choose_shape(batch, longest, slots, waits=waits)
        return replace(shape, waiting=min(shape.waiting, waiting))

    monkeypatch.setattr(generator, "choose_shape", choose_waiting)
    whole = find_logits("all")
    assert not read
    assert find_logits(0) == whole
    # 382 and 256 tokens, 140 and 17, then 2; each batch takes one more token.
    passes = {384: 1 + 1 + 1, 256: 2 + 1 + 1, 0: 3 + 2 + 1}[waiting] + 3
    assert read == [*range(4)] * passes


def test_layers_or_waiting_chunks_have_memory_by_what_reads_least(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    folder = tiny.model(**sizes)
    config = tiny.config(folder, task="causal-lm", method="full", data__max_seq_len=384)
    layout, none = build_layout(folder, config), StepShape(2, 128, 384)
    place = folder, config, layout, device.binding_limit
    all_wait = generator._plan_step(*place, replace(none, waiting=384), 2).total
    without = generator._plan_step(*place, none, 3).total
    assert all_wait < without
    for module in (generator, loaded_model):
        monkeypatch.setattr(module, "measure_available_memory", lambda _: -(-without // USABLE))
    for new, resident in ((1, 2), (60, 3)):
        made = generator.load_generator(
            folder, config, layout, None, device, longest=300, max_new_tokens=new, batch=2
        )
        assert made._uploads is not None
        assert len(made._uploads._order) == 8 - resident


def test_what_does_not_fit(device: Device, tiny: Tiny) -> None:
    folder = tiny.model()
    config = tiny.config(folder, task="causal-lm", data__max_seq_len=POSITIONS, lora__lora_rank=4)
    small = Device(device.adapter, binding_limit=32 << 10)
    models = Both(folder, config, small, batch=4)
    # 4 heads of 16 rows and 128 slots fit for one sample, and in pieces of 16.
    asked = prompts(40, 2)
    made = models.generator.generate(asked, max_new_tokens=3, sampling=GREEDY)
    assert made == [models.greedy(prompt, 3) for prompt in asked]
    with pytest.raises(InputError, match="256 tokens of one sample do not fit: an array exceeds"):
        models.generator.generate(asked, max_new_tokens=200, sampling=GREEDY)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_memory_decides_how_many_layers_stay(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    folder = tiny.model(**sizes, tie_word_embeddings=False)
    settings = {"task": "causal-lm", "method": method, "data__max_seq_len": 128}
    config = tiny.config(folder, **settings)
    layout, asked = build_layout(folder, config), prompts(40, 2, 7)
    weights = None if method == "full" else initial_weights(layout, folder, config)

    def need(resident: int | None, batch: int, chunk: int) -> int:
        shape = StepShape(batch, chunk, 128)
        place = folder, config, layout, device.binding_limit
        return generator._plan_step(*place, shape, resident).total

    def load(free: int) -> tuple[int | None, list[list[int]]]:
        memory = math.ceil(free / USABLE)
        for module in (generator, loaded_model):
            monkeypatch.setattr(module, "measure_available_memory", lambda _: memory)
        made = generator.load_generator(
            folder, config, layout, weights, device, longest=40, max_new_tokens=NEW, batch=2
        )
        uploads = made._uploads
        stays = None if uploads is None else 8 - len(uploads._order)
        return stays, made.generate(asked, max_new_tokens=NEW, sampling=GREEDY)

    whole = load(2 * need(None, 2, 64))
    assert whole[0] is None
    assert load(need(None, 1, 16)) == whole, "a prompt fits with all layers"
    assert need(3, 2, 64) < need(None, 1, 16)
    for resident in (3, 0):
        assert load(need(resident, 2, 64)) == (resident, whole[1])
    assert load(need(0, 1, 16)) == (0, whole[1]), "in smaller chunks, one after the other"
    with pytest.raises(InputError, match=r"the run needs .* are free; use fewer tokens$"):
        load(need(0, 1, 16) - 4)


def test_fewer_chunks_wait_where_memory_is_short(
    device: Device, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model(num_hidden_layers=3)
    config = tiny.config(folder, task="causal-lm", method="full", data__max_seq_len=384)
    layout, shape = build_layout(folder, config), StepShape(1, 16, 384, 128)
    config = Compute(resident=0).apply_storage(config)
    made = generator.load_generator(
        folder, config, layout, None, device, longest=300, max_new_tokens=2, batch=1
    )
    plan = MemoryPool(None)
    record_step(plan, made._decoder, shape, device.binding_limit)
    free = math.ceil(plan.report_budget().total / USABLE)

    def continue_prompt() -> tuple[StepShape, list[list[int]]]:
        answers = made.generate(prompts(300), max_new_tokens=2, sampling=GREEDY)
        assert made._made is not None
        made_shape = made._made[1].shape
        made.release()
        return made_shape, answers

    whole = continue_prompt()
    assert whole[0] == StepShape(1, 128, 384, 384)
    monkeypatch.setattr(generator, "measure_available_memory", lambda _: free)
    assert continue_prompt() == (shape, whole[1])
    monkeypatch.undo()
    take, failed = MemoryPool.take, list[str]()

    def fail_first(pool: MemoryPool, *given: Any, **named: Any) -> Any:
        if pool.device is not None and named.get("purpose") == "waiting" and not failed:
            failed.append("waiting")
            raise OutOfMemoryError("Not enough memory left")
        return take(pool, *given, **named)

    monkeypatch.setattr(MemoryPool, "take", fail_first)
    assert continue_prompt() == (StepShape(1, 64, 384, 384), whole[1])


@pytest.mark.parametrize(
    ("longest", "resident", "shape"),
    [
        (9, None, StepShape(2, 16, 128)),
        (9, 2, StepShape(2, 16, 128)),
        (150, None, StepShape(2, 128, 256)),
        (150, 2, StepShape(2, 128, 256, 256)),
    ],
)
def test_what_is_planned_is_what_is_taken(
    device: Device, tiny: Tiny, longest: int, resident: int | None, shape: StepShape
) -> None:
    """But for parameters, which are a few pages."""
    folder = tiny.model(num_hidden_layers=5)
    config = tiny.config(folder, task="causal-lm", method="full", data__max_seq_len=shape.slots)
    layout = build_layout(folder, config)
    planned = generator._plan_step(
        folder, config, layout, device.binding_limit, shape, resident
    ).total
    asked = Compute(resident="all" if resident is None else resident).apply_storage(config)
    gc.collect()
    before = device.allocated
    made = generator.load_generator(
        folder, asked, layout, None, device, longest=longest, max_new_tokens=2, batch=2
    )
    made.generate(prompts(longest, 3), max_new_tokens=2, sampling=GREEDY)
    assert planned <= device.allocated - before < planned + 300_000


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_replica_answers_between_steps_as_torch_does(
    device: Device, tiny: Tiny, method: str
) -> None:
    """At the very end of its positions, which are no whole chunk; later gradients are the same."""
    folder = tiny.model()
    settings = {"task": "causal-lm", "method": method, "data__max_seq_len": 40}
    replica, _ = tiny.wgpu(device, folder, **settings)
    judge, _ = tiny.start(folder, **settings)
    batch = tiny.batch(3, "causal-lm")
    before, _, _ = gradient(replica, batch)
    asked = prompts(34, 3, 20)
    assert replica.answer(asked, NEW, frozenset()) == judge.answer(asked, NEW, frozenset())
    assert np.array_equal(gradient(replica, batch)[0], before)
