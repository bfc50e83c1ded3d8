"""Settings derived from data, model and memory if only these are given.

The same data, model and memory give the same settings. Torch-free. An unreadable file decides
nothing: its reader reports the error.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.run import RunConfig
from trainer.data.formats import count_records
from trainer.data.labelling import check_count, find_labels, iter_objects, with_names
from trainer.data.labels import LabelColumn
from trainer.data.shapes import parse_sample
from trainer.data.values import BadLineError
from trainer.model.architecture import read_positions
from trainer.model.class_names import read_class_names
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.planning.devices import count_text
from trainer.planning.workers import Room, RunMemory
from trainer.system import pci
from trainer.system.cgroups import free_memory
from trainer.system.errors import InputError

DERIVED_KEYS = frozenset(
    (
        *("task", "num_classes", "class_names", "model.dtype", "model.quantization"),
        *("data.validation_fraction", "data.max_seq_len", "lora.lora_rank", "lora.lora_alpha"),
        *("optimizer.learning_rate", "training.epochs", "training.batch_size"),
        "training.evaluate_every",
    )
)
"""Every setting that `derive_settings` may return."""
HELD_OUT = 0.1
LEAST_TO_HOLD_OUT = 10
"""Samples; with fewer, none are held out."""
SHORTEST, LONGEST = 64, 2048
"""Tokens of `data.max_seq_len`."""
_LEAST_LENGTH = 128
"""A lack of memory does not shorten samples below this."""

_LONGEST_VALUE = 40

_BATCHES = ((500, 8), (20_000, 16), (math.inf, 32))
_EPOCHS = ((5_000, 3), (50_000, 2), (math.inf, 1))
"""By the number of training samples, up to each figure."""
_SIZES = ((1e8, 16, 1e-3, 3e-4), (3e9, 16, 2e-4, 2e-5), (math.inf, 8, 1e-4, 1e-5))
"""By the number of weights: LoRA's rank and learning rate, and the rate of method full. A larger
model needs less of both, and each step's traffic grows with the rank."""
_STORED: tuple[dict[str, str], ...] = (
    {"model.dtype": "bfloat16"},
    {"model.dtype": "bfloat16", "model.quantization": "nf4"},
)
"""Ways to store a frozen base that does not fit, each smaller than the last."""


@dataclass(frozen=True)
class Derived:
    """One setting by its dotted path, with the reason for its value."""

    key: str
    value: str | int | float | tuple[str, ...]
    why: str


_TASKS = {
    **dict.fromkeys(("num_classes", "class_names"), "classify"),
    **dict.fromkeys(("training.label_smoothing", "training.class_weights"), "classify"),
    "dpo.beta": "dpo",
}
"""The task of which a setting is."""


def provisional_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings to load a config with until `derive_settings` knows the right ones."""
    of_given = (task for key, task in _TASKS.items() if given.get(key))
    found: dict[str, Any] = {"task": given.get("task") or next(of_given, "causal-lm")}
    if found["task"] == "classify" and not (given.get("num_classes") or given.get("class_names")):
        weights = given.get("training.class_weights")
        found["num_classes"] = max(2, len(weights)) if isinstance(weights, list) else 2
    validates = given.get("training.evaluate_every") and "data.train" in given
    if validates and not {"data.validation", "data.validation_fraction"} & set(given):
        found["data.validation_fraction"] = HELD_OUT
    return found


def derive_settings(
    config: RunConfig, given: Collection[str], model_dir: Path | None, rooms: Sequence[Room]
) -> list[Derived]:
    """Return the settings that follow from data, model and memory.

    Args:
        config: with the given settings; others are ignored.
        given: the dotted paths of the given settings, which are not changed.
        model_dir: the model's folder; None if it is not on this machine yet.
        rooms: memory of the training devices, the smallest decides; none: memory is ignored.

    Raises:
        InputError: some lines have labels and some have none, or the labels are no classes.
    """
    data = Path(config.data.train)
    if (
        config.distillation is not None
        or next(iter_objects(data, config.data.columns), None) is None
    ):
        return []
    found = [part for part in _derive_task(config, given, model_dir) if part.key not in given]
    with contextlib.suppress(InputError):  # such as 4,000 classes: reported on use
        derived = _with_derived(config, found)
        found += _derive_schedule(derived, given)
        if model_dir is not None:
            found += _of_model(_with_derived(config, found), given, model_dir, rooms)
    return [part for part in found if part.key not in given]


def check_task(config: RunConfig) -> None:
    """Check by its labels and its first line that data is of a run's task; its reader checks all.

    Raises:
        InputError: it is not.
    """
    data, base = config.data, ()
    with contextlib.suppress(InputError):  # another check reads the model
        base = read_class_names(read_config(Path(config.model.path)))
    config = with_names(config, base)
    labels = None if config.classes is None else LabelColumn(config.classes)
    for record in itertools.islice(iter_objects(Path(data.train), data.columns), 1):
        try:
            parse_sample(record.tree, record.number, labels, pairs=config.task == "dpo")
        except BadLineError as error:
            raise InputError(f"{record.location}: {error}") from None


def run_work(config: RunConfig, model_dir: Path) -> tuple[float, float]:
    """Return the samples and the tokens that a run trains on, at the mean length of some samples.

    Raises:
        InputError: the tokenizer cannot be used.
        OSError: the data cannot be read.
    """
    limit = config.data.max_seq_len
    left = count_records(Path(config.data.train), config.data.columns) * (
        1 - config.data.validation_fraction
    )
    lengths = [min(length, limit) for length in _sample_lengths(config, model_dir)]
    samples = config.training.count_samples(left)
    return samples, samples * (sum(lengths) / len(lengths) if lengths else limit)


def own_rooms(backend: str) -> list[Room]:
    """Return the memory that a run alone on this machine may take."""
    import psutil  # of the extras that train; the launcher, which has none of them, asks the hosts

    card = None if backend == "cpu" else pci.largest_free_memory()
    if card is None:
        return [Room(free_memory(psutil.virtual_memory().available), "cpu", coordinates=True)]
    return [Room(card, "wgpu" if backend == "wgpu" else "cuda")]


def format_table(found: Sequence[Derived], output: str) -> list[str]:
    """Return a heading and a line for each setting: key, value and reason in columns.

    Args:
        output: the folder beside whose results the settings will stand.
    """
    if not found:
        return []
    width = max(len(part.key) for part in found)
    values = [_show_value(part.value) for part in found]
    size = max(map(len, values))
    lines = [
        f"  {part.key:<{width}}  {value:<{size}}  {part.why}"
        for part, value in zip(found, values, strict=True)
    ]
    return [f"settings by data and model, all of them in {output}/run.yaml:", *lines]


def _show_value(value: Any) -> str:
    """Return a value in a line; names are cut, `run.yaml` has them all."""
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    text = ", ".join(map(str, parts))
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."


def _with_derived(config: RunConfig, found: Sequence[Derived]) -> RunConfig:
    return config.with_settings({part.key: part.value for part in found})


def _derive_task(
    config: RunConfig, given: Collection[str], model_dir: Path | None
) -> Iterator[Derived]:
    """Yield the task and its classes; a task that is given needs no labels on all lines."""
    data, base = Path(config.data.train), ()
    named = min({"num_classes", "class_names"} & set(given), default=None)
    if "task" in given and config.task != "classify":
        return
    if model_dir is not None:
        base = read_class_names(read_config(model_dir))
    if named == "class_names":
        yield Derived("task", "classify", "class_names is given")
        return
    found = find_labels(data, base, config.data.columns)
    assert found is not None
    if "task" not in given:
        task = "classify" if named else found.task
        has = "a" if task == "classify" else "no"
        yield Derived("task", task, f"{named} is given" if named else f"lines have {has} label")
    if found.classes is None:
        return
    names, count = (), found.classes
    if isinstance(found.classes, tuple):
        names, count = found.classes, len(found.classes)
        if named == "num_classes":
            assert config.num_classes is not None
            check_count(data, names, config.num_classes)
        yield Derived("num_classes", count, f"the labels name {count} classes")
    else:
        lacking = ", ".join(map(str, found.absent[:5])) + (", ..." if found.absent[5:] else "")
        none = f"; no label is {lacking}" if found.absent else ""
        yield Derived("num_classes", count, f"every label is below {count}{none}")
    if model_dir is not None and (names or len(base) == count):  # whose classes have an order
        why = "the words" if names != base else "the classes of the model"
        yield Derived("class_names", names or base, why)


def _derive_schedule(config: RunConfig, given: Collection[str]) -> Iterator[Derived]:
    """Yield the settings that follow from the number of samples."""
    count = count_records(Path(config.data.train), config.data.columns)
    fraction = config.data.validation_fraction
    if not {"data.validation", "data.validation_fraction"} & set(given):
        fraction, why = 0.0, f"{count} samples are too few to hold some out"
        if count >= LEAST_TO_HOLD_OUT:
            fraction, why = HELD_OUT, f"of {count:,} samples, and no validation file"
        yield Derived("data.validation_fraction", fraction, why)
    left = count - round(count * fraction)
    why = f"{left:,} samples to train on"
    batch = config.training.batch_size
    if "training.batch_size" not in given:
        batch = _by_size(_BATCHES, left)[0]
        yield Derived("training.batch_size", batch, why)
    epochs, steps = config.training.epochs, config.training.max_steps
    if steps is None and "training.epochs" not in given:
        epochs = _by_size(_EPOCHS, left)[0]
        yield Derived("training.epochs", epochs, why)
    an_epoch = math.ceil(left / batch)
    if (fraction or config.data.validation) and (steps or an_epoch * epochs) > an_epoch:
        yield Derived("training.evaluate_every", an_epoch, "once an epoch")


def _of_model(
    config: RunConfig, given: Collection[str], model_dir: Path, rooms: Sequence[Room]
) -> list[Derived]:
    """Return the settings that follow from the model, the data in tokens, and the memory."""
    weights = sum(math.prod(header.shape) for header in read_headers(model_dir).values())
    rank, rate, full_rate = _by_size(_SIZES, weights)
    why = f"{count_text(weights)} weights"
    found: list[Derived] = []
    if config.method == "lora":
        found.append(Derived("lora.lora_rank", rank, why))
        if "lora.lora_rank" not in given:
            found.append(Derived("lora.lora_alpha", 2 * rank, "twice the rank"))
    else:
        rate = full_rate
    found.append(Derived("optimizer.learning_rate", rate, f"{why}, method {config.method}"))
    if "data.max_seq_len" not in given and (lengths := _sample_lengths(config, model_dir)):
        found.append(_derive_length(lengths, read_positions(model_dir)))
    kept = [part for part in found if part.key not in given]
    return kept if not rooms else _fit_memory(config, kept, given, model_dir, rooms)


def _sample_lengths(config: RunConfig, model_dir: Path) -> list[int]:
    try:
        from trainer.data.lengths import measure_lengths
    except ModuleNotFoundError:  # a laptop that drives a cluster has no library of tokenizers
        return []
    data = config.data
    path, pairs = Path(data.train), config.task == "dpo"
    return measure_lengths(path, model_dir, config.classes, data.columns, pairs=pairs)


def _derive_length(lengths: Sequence[int], limit: int | None) -> Derived:
    """Return a length that cuts at most one sample in a hundred, if the model allows it."""
    needed = sorted(lengths)[math.ceil(0.99 * len(lengths)) - 1]
    value, why = (
        SHORTEST * math.ceil(needed / SHORTEST),
        f"99 % of samples have up to {needed:,} tokens",
    )
    if value > LONGEST:
        value, why = LONGEST, f"{why}; more on request"
    if limit is not None and value > limit:
        value, why = limit, f"{why}; the model has no more"
    return Derived("data.max_seq_len", value, why)


def _fit_memory(
    config: RunConfig,
    found: Sequence[Derived],
    given: Collection[str],
    model_dir: Path,
    rooms: Sequence[Room],
) -> list[Derived]:
    """Return `found` with a base and a length that fit all rooms; what cannot fit is refused later.

    The base is also stored smaller if only that keeps an accelerator busy.
    """
    derived = _with_derived(config, found)
    run = RunMemory.of_model_folder(model_dir, derived)

    def is_enough(changes: Mapping[str, Any], least: bool) -> bool:
        memory = replace(run, config=derived.with_settings(changes))
        return all(memory.fits_room(room, busy=not least) for room in set(rooms))

    own = {"model.dtype": derived.model.dtype, "model.quantization": derived.model.quantization}
    if derived.training.precision == "fp32":
        given = {*given, "model.dtype"}  # products would not be fp32
    ways = [own, *(own | {key: way[key] for key in way.keys() - given} for way in _STORED)]
    ways = [way for way in ways if derived.method == "lora" or way == own]
    stored = next((way for way in ways if is_enough(way, least=False)), ways[-1])
    length = derived.data.max_seq_len
    if "data.max_seq_len" not in given:
        while length // 2 >= _LEAST_LENGTH and not is_enough(
            stored | {"data.max_seq_len": length}, least=True
        ):
            length //= 2
    memory = f"{min(room.memory for room in rooms) / 2**30:.1f} GiB of memory for a worker"
    chosen = [Derived(key, value, memory) for key, value in stored.items() if value != own[key]]
    for part in found:
        if part.key == "data.max_seq_len" and part.value != length:
            part = Derived(part.key, length, f"{part.why}; {memory}")
        chosen.append(part)
    return chosen


def _by_size(steps: Sequence[tuple[Any, ...]], size: float) -> tuple[Any, ...]:
    return next(tuple(rest) for most, *rest in steps if size <= most)
