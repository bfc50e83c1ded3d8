"""What is computed on a pretended or a real device, and on the CPU to compare with; and faults.

A case yields after each step a function that returns what the step computed.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.pretend_cuda.card import Stream, inserted
from tests.pretend_cuda.real_card import attached
from tests.trainer.replica.driving import drawn_weights, gradient, relative, taught
from tests.trainer.replica.torch.parallel.one_process import run_config, samples
from tests.trainer.script_run import script_config, write_script
from tests.waiting import PATIENCE
from trainer.config.run import RunConfig
from trainer.config.script import read_script
from trainer.data.tokens import Encoded
from trainer.distill.logits.scores import Scheme
from trainer.distill.student.optimizer import StudentOptimizer
from trainer.distill.teacher.scoring import Teacher
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.distill.teacher.windows import UnscoredWindow
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import TrainState
from trainer.planning import logit_chunks, stored_layers
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.replica import residence
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.replica.script.replica import ScriptReplica
from trainer.replica.script.user_script import UserScript
from trainer.replica.torch import kd_loss, objective
from trainer.replica.torch.batch import MicroBatch, Targets
from trainer.replica.torch.decoder import Backbone
from trainer.replica.torch.generator import load_generator
from trainer.replica.torch.gradient_stream import _PinnedCopies
from trainer.replica.torch.parallel.mesh import make_mesh
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.replica.torch.replica import TorchReplica
from trainer.replica.torch.streaming import DeviceSlots, StreamedHead
from trainer.run.distributed.optimizer import ParallelAdamW

Settings = dict[str, Any]
Steps = Iterator[Callable[[], list[Any]]]
SAMPLES, VOCABULARY = 7, 300
"""Two micro-batches of a replica."""
HEAD_ROWS = 64
"""Rows of a chunk of a head that is read."""
_CYCLES = 1 << 26
"""Some 40 ms of a card."""
_SAME_AS = {"resumed": "student"}
"""The case whose results a case has, if not its own."""


def compare(case: str, folder: str, settings: Settings, real: bool = False) -> dict[str, Any]:
    """Return how far two steps of a case are from the CPU's, and the waits of the second."""
    wanted: list[Any] = []
    for step in islice(_steps(_SAME_AS.get(case, case), folder, settings, "cpu"), 2):
        wanted += step()
    results: list[Any] = []
    waits: dict[str, int] = {}
    number = dist.get_rank() if real and dist.is_initialized() else 0
    with attached() if real else inserted() as card:
        for step in islice(_steps(case, folder, settings, f"cuda:{number}"), 2):
            waits = dict(card.waits)
            results += step()
            card.waits.clear()
    pairs = zip(map(np.ravel, results), map(np.ravel, wanted), strict=True)
    return {"waits": waits, "far": float(np.max([relative(mine, its) for mine, its in pairs]))}


def compare_residents(
    case: str, folder: str, settings: Settings, real: bool = False
) -> dict[str, Any]:
    """Return whether a case with no resident layer has the bits of the one with all of them."""
    results: list[list[bytes]] = []
    next(_steps(case, folder, settings, "cpu"))()  # what is imported must not see the device
    with attached() if real else inserted():
        for resident in ("all", 0):
            own = settings | {"model.resident": resident}
            steps = islice(_steps(case, folder, own, "cuda:0"), 2)
            results.append([np.asarray(part).tobytes() for step in steps for part in step()])
    return {"same": results[0] == results[1], "results": len(results[0])}


def compare_heads(case: str, folder: str, settings: Settings, real: bool = False) -> dict[str, Any]:
    """Return whether a head that is read has the bits of one that stays, and what is of it there.

    `rows`: most rows of the head that a tensor of the device has, of which there are two slots.
    `together`: chunks of logits for which one read serves.
    """
    next(_steps(case, folder, settings, "cpu"))()  # what is imported must not see the device
    seen: list[int] = []
    together: set[int] = set()
    read = StreamedHead._read_rows

    def count_rows(head: StreamedHead, *given: Any, **more: Any) -> torch.Tensor:
        found = read(head, *given, **more)
        slots: Any = head._stream._slots
        rows = (slot.numel() // (4 * head.in_features) for slot in slots._slots)
        tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
        tables = (each.shape[0] for each in tensors if each.shape == head.shape and each.is_cuda)
        seen.extend((*rows, *tables))
        together.add(head.logit_chunks)
        return found

    results: list[list[bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_layers, "HEAD_ELEMENTS", HEAD_ROWS * 128)
        for module in (kd_loss, logit_chunks):
            patch.setattr(module, "LOGIT_ELEMENTS", 20 * VOCABULARY)
        patch.setattr(residence, "stream_head", lambda _found, plan, *_: plan(HEAD_STREAMED))
        patch.setattr(StreamedHead, "_read_rows", count_rows)
        with attached() if real else inserted():
            for resident in ("all", 0):
                own = settings | {"model.resident": resident}
                steps = islice(_steps(case, folder, own, "cuda:0"), 2)
                results.append([np.asarray(part).tobytes() for step in steps for part in step()])
    same = results[0] == results[1]
    found = {"same": same, "results": len(results[0]), "rows": max(seen)}
    return found | {"together": max(together)}


def _steps(case: str, folder: str, settings: Settings, device: str) -> Steps:
    return globals()[case](Path(folder), settings, device)


def faulty(
    fault: str, folder: str, real: bool = False, resident: int | str = "all"
) -> dict[str, Any]:
    """Return the same of a worker with a fault, which this process then keeps."""
    owner, name, change = _FAULTS[fault]
    if real and owner is Stream:
        owner = torch.cuda.Stream
    whole = getattr(owner, name)
    setattr(owner, name, lambda *given, **settings: change(whole, *given, **settings))
    settings = {"training.precision": "fp32", "model.resident": resident}
    return compare("worker", folder, settings, real)


def _occupy(device: str) -> None:
    """Give a card work that lasts, so that what does not wait for the step's comes too early."""
    if device != "cpu":
        torch.cuda._sleep(_CYCLES)


def worker(folder: Path, settings: Settings, device: str) -> Steps:
    """Run a worker's steps."""
    config = run_config(str(folder), settings)
    weights = drawn_weights(folder, config)
    made = TorchReplica(folder, config, build_layout(folder, config), device, threads=1)
    for seed in count():
        made.write_trainable(weights)
        batch = _batch(config, seed)
        _occupy(device)
        flat, result, _ = gradient(made, batch)
        yield lambda found=(flat, result.loss_sum): [*found]


def _batch(config: RunConfig, seed: int) -> list[Encoded]:
    found = samples(config, SAMPLES, VOCABULARY, seed)
    if config.task != "dpo":
        return found
    others = found[1:] + found[:1]
    return [replace(one, rejected=other) for one, other in zip(found, others, strict=True)]


def scores(folder: Path, settings: Settings, device: str) -> Steps:
    """Score samples."""
    given = dict(settings)
    resident = given.pop("model.resident", "all")
    config = run_config(str(folder), given)
    layout, used = build_layout(folder, config), Compute(resident=resident).apply_storage(config)
    made = TorchReplica(folder, used, layout, device, threads=1, evaluates=True)
    if config.method == "lora":
        made.write_trainable(drawn_weights(folder, config))
    for seed in count():
        batch = _batch(config, seed)
        _occupy(device)
        result = made.evaluate(batch)
        yield lambda found=result: [found.loss_sum, found.confusion or 1.0]


def script(_: Path, settings: Settings, device: str) -> Steps:
    """Run a script's steps and validations; `collate` has tensors in mappings and a tuple."""
    # A pretended tensor cannot become the data of a parameter of the host.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with tempfile.TemporaryDirectory() as kept:
        path = write_script(Path(kept) / "train.py", *_COLLATED)
        config = script_config(Path(kept) / "out", **settings)
        user_script = UserScript(read_script(path), 0, PATIENCE)
        weights = user_script.read_weights()
        made = ScriptReplica(user_script, config, device)
        for seed in count():
            made.write_trainable(weights)
            _occupy(device)
            indices: Any = range(seed, seed + SAMPLES)
            flat, result, order = gradient(made, indices)
            assert [*order] == [*made.layout.send_order]
            score = made.evaluate(indices[:4])
            figures = (score.loss_sum, *score.figures.values())
            yield lambda found=(flat, result.loss_sum, *figures): [*found]


_STACKED = "    x, y = (torch.stack(part) for part in zip(*samples))\n"
_COLLATED = (
    (_STACKED, "    x, (y, _) = samples['x'], samples['more']['y']\n"),
    ("len(samples)", "len(y)"),
    (
        "def loss",
        f"from types import MappingProxyType\n\ndef collate(samples):\n{_STACKED}"
        "    more = MappingProxyType({'y': (y, len(y))})\n"
        "    return {'x': x, 'more': more}\n\ndef loss",
    ),
)


def student(folder: Path, settings: Settings, device: str) -> Steps:
    """Run a student's steps."""
    config = run_config(str(folder), settings)
    made, optimizer = _student(folder, config, device)
    for step in count(1):
        figures = _train(made, optimizer, config, step, device)
        yield lambda figures=figures: [*figures, optimizer.snapshot(1).weights]


def resumed(folder: Path, settings: Settings, device: str) -> Steps:
    """Run them with another replica for each, which begins where the last one ended."""
    config = run_config(str(folder), settings)
    made, optimizer = _student(folder, config, device)
    for step in count(1):
        figures = _train(made, optimizer, config, step, device)

        def resume(step: int = step, figures: tuple[float | None, ...] = figures) -> list[Any]:
            nonlocal made, optimizer
            saved = optimizer.snapshot(step)
            vectors = saved.weights, saved.first_moment, saved.second_moment
            made, optimizer = _student(folder, config, device)
            optimizer.restore(TrainState(*(vector.copy() for vector in vectors), step=step))
            return [*figures, saved.weights]

        yield resume


def _student(folder: Path, config: RunConfig, device: str) -> tuple[TorchReplica, StudentOptimizer]:
    layout = build_layout(folder, config)
    made = TorchReplica(folder, config, layout, device, threads=1, moments=True)
    made.write_trainable(drawn_weights(folder, config))
    return made, StudentOptimizer(config.optimizer, layout, made.weights, made.gradient)


def _train(
    made: TorchReplica, optimizer: StudentOptimizer, config: RunConfig, step: int, device: str
) -> tuple[float | None, ...]:
    batch = taught(_batch(config, step))
    _occupy(device)
    result = made.accumulate(batch, 0.6)
    norm = optimizer.apply(step, 1e-3, result.weight)
    return result.loss_sum, result.kl_sum, norm


def rank(folder: Path, settings: Settings, device: str) -> Steps:
    """Run the steps of one of several ranks."""
    config = run_config(str(folder), settings)
    layout, place = build_layout(folder, config), torch.device(device)
    mesh = make_mesh(config.parallel, dist.get_world_size(), place.type)
    made = ParallelReplica(folder, config, layout, mesh, place, drawn_weights(folder, config))
    optimizer = ParallelAdamW(config.optimizer, layout, made.parameters, made.copy_counts)
    for step in count(1):
        batch = samples(config, 2 * SAMPLES, VOCABULARY, step)
        mine = [batch[index] for index in made.local_samples(len(batch))]
        _occupy(device)
        result = made.accumulate(mine)
        figures = result.loss_sum, optimizer.apply(step, 1e-3)
        yield lambda figures=figures: [
            *figures,
            *_on_first(made.gather_parameters(made.parameters)),
        ]


def _on_first(whole: np.ndarray | None) -> list[np.ndarray]:
    return [] if whole is None else [whole]


def generation(folder: Path, settings: Settings, device: str) -> Steps:
    """Continue three prompts by five tokens."""
    given = dict(settings)
    resident = given.pop("model.resident", "all")
    config = run_config(str(folder), given)
    layout, used = build_layout(folder, config), Compute(resident=resident).apply_storage(config)
    weights = drawn_weights(folder, config) if config.method == "lora" else None
    made = load_generator(folder, used, layout, weights, device)
    for seed in count():
        sampling = Sampling(0.8, seed=seed)
        _occupy(device)
        tokens = made.generate([[5, 6, 7], [9] * 11, [4, 5]], max_new_tokens=5, sampling=sampling)
        yield lambda tokens=tokens: [tokens]


def teacher(folder: Path, settings: Settings, device: str) -> Steps:
    """Score two windows for a student with other token ids."""
    given = dict(settings)
    kept, dtype = given.pop("model.resident", "all"), given.pop("dtype", "float32")
    model = TorchEngine(
        folder,
        getattr(torch, dtype),
        device,
        resident=kept if isinstance(kept, int) else None,
        quantization=given.pop("quantization", "none"),
    )
    ids = np.arange(VOCABULARY, dtype=np.int32)[::-1].copy()
    made = Teacher(model, Scheme(**given), ids, 0, 4096)
    for seed in count():
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (2, 20), np.int32)
        _occupy(device)
        windows = made.score_pieces(
            [UnscoredWindow(number, 0, row) for number, row in enumerate(tokens)]
        )
        found = [field for window in windows for field in astuple(window.scores)]
        yield lambda found=found: [field for field in found if np.any(field)]


def _rotation_stays(init: Any, made: Any, *given: Any) -> None:
    init(made, *given)
    made._turns = made._turns.cpu()


def _targets_stay(to: Any, batch: MicroBatch, device: torch.device) -> MicroBatch:
    moved = to(batch, device)
    return replace(moved, targets=Targets(*(part.cpu() for part in moved.targets)))


def _copies_at_once(wait: Any, stream: Any, event: Any) -> None:
    if stream.is_default:
        wait(stream, event)


def _computes_at_once(wait: Any, stream: Any, event: Any) -> None:
    if not stream.is_default:
        wait(stream, event)


def _asking(language: Any, *given: Any, **settings: Any) -> Any:
    found, weight = language(*given, **settings)
    found.loss.item()
    return found, weight


_FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "rotation on the host": (Backbone, "__init__", _rotation_stays),
    "targets on the host": (MicroBatch, "to", _targets_stay),
    "no copy": (_PinnedCopies, "start", lambda *_: None),
    "no wait for the copy": (_PinnedCopies, "wait", lambda *_: True),
    "no wait for the gradient": (Stream, "wait_stream", lambda *_: None),
    "a layer's copy that does not wait": (Stream, "wait_event", _copies_at_once),
    "a layer that does not wait for its copy": (Stream, "wait_event", _computes_at_once),
    "a read that does not wait": (DeviceSlots, "_wait_until_copied", lambda *_: None),
    "an item in each micro-batch": (objective, "language_loss", _asking),
}
"""What is replaced, by what, which gets what it replaces."""
