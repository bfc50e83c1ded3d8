"""An engine writes only once it is admitted: wrong, killed, cramped and damaged ones, by doubles.

The doubles implement `Engine` for real: torch computes, and each adds its own fault.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import click
import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.forked import CONTEXT
from tests.trainer.small_teacher import load, teach, wish, write_corpus, write_teacher
from trainer.config.distill_job import TeacherJob
from trainer.config.teacher_engines import EngineFacts
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.heartbeat import TeacherWatch
from trainer.distill.logits.shard_folder import verify_shards
from trainer.distill.teacher import admission, torch_engine
from trainer.distill.teacher.admission import LIMIT, TOKENS, admit_engine
from trainer.distill.teacher.assignment import ScoringRequest, assign_request
from trainer.distill.teacher.audit import AuditResult, audit_limit, audit_windows, open_auditor
from trainer.distill.teacher.engines import ENGINES, EngineKind, WeightType
from trainer.distill.teacher.run import TeacherRun
from trainer.distill.teacher.scoring import Teacher, open_teacher
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.planning.forward import ForwardSize, frozen_setup, plan_forward
from trainer.planning.model_config import read_shape
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.planning.teachers import BATCH
from trainer.replica.backend import Compute
from trainer.system.errors import InputError, NonFiniteError, RefusedError

INT4 = EngineFacts(quantization="int4")
BATCHES = 12
"""Of the pass before a fault; each shard has one or a few."""


class Double:
    """An engine that computes what transformers does, but for its fault after some forwards."""

    def __init__(
        self,
        model_dir: Path,
        weights: WeightType,
        compute: Compute,
        *_forward: object,
        healthy: int = 0,
    ) -> None:
        self._torch = TorchEngine(model_dir, getattr(torch, weights.dtype))
        self.vocab_size, self.device = self._torch.vocab_size, self._torch.device
        self.place = self._torch.place
        self._calls, self._healthy = 0, healthy

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        self._calls += 1
        for logits in self._torch.iterate_logits(batch):
            yield logits if self._calls <= self._healthy else self.faulty(logits)

    def faulty(self, logits: Tensor) -> Tensor:
        return logits


class Wrong(Double):
    """The most likely token is right and the distribution is not: its text would look well."""

    def faulty(self, logits: Tensor) -> Tensor:
        return logits * 0.4


class WrongWherePadded(Double):
    """Computes what is right for a window alone, and something else for a shorter one beside it."""

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        together = max(len(tokens) for tokens in batch)
        for tokens in batch:
            for logits in self._torch.iterate_logits([tokens] if len(tokens) > 1 else []):
                yield logits if len(tokens) == together else self.faulty(logits)

    def faulty(self, logits: Tensor) -> Tensor:
        return logits * 0.4


class Broken(Double):
    """Computes NaN."""

    def faulty(self, logits: Tensor) -> Tensor:
        return logits * torch.nan


class Killed(Double):
    """Is killed in the middle of a forward, as by the system that has no memory left."""

    def faulty(self, logits: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class Cramped(Double):
    """Has room for two full windows at most."""

    room = 128

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        if len(batch) * max(len(tokens) for tokens in batch) > self.room:
            raise MemoryError
        return super().iterate_logits(batch)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("engines")
    corpus = write_corpus(folder / "texts.jsonl", 48)
    return write_teacher(folder / "model", corpus), corpus


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "logits"


@pytest.fixture
def by(
    files: tuple[Path, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ScoringRequest]:
    """Return a request for an engine of the table, or for a double that is put there."""

    def by(engine: type[Double] | str, **settings: int) -> ScoringRequest:
        if isinstance(engine, str):
            return wish(*files, out, engine=engine)
        monkeypatch.setitem(ENGINES, "double", EngineKind(partial(engine, **settings), INT4))
        return wish(*files, out, engine="double")

    return by


def in_the_pass(request: ScoringRequest) -> int:
    """Return how many forwards an engine has to do well to be admitted, and to write something."""
    windows = assign_request(request).first_windows(TOKENS)
    return -(-len(windows) // 2) + BATCHES


def contents(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("shard-*/logits.parquet")}


def is_whole(folder: Path) -> bool:
    return {verdict.state for verdict in verify_shards(LogitsFolder(folder))} == {"whole"}


def last_state(folder: Path) -> tuple[str, str | None]:
    (status,) = TeacherWatch(LogitsFolder(folder)).list_teachers()
    return status.state.state, status.state.reason


def test_an_admitted_engine_is_named_with_its_distance_from_transformers(
    by: Callable[..., ScoringRequest], out: Path
) -> None:
    teach(by(Double))
    teacher = LogitsFolder(out).description.teacher
    assert (teacher.engine, teacher.quantization) == ("double", "int4")
    assert teacher.kl is not None
    assert teacher.kl < 1e-6
    assert is_whole(out)


def test_the_reference_is_read_from_its_file_or_has_to_fit(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in fp16 are loaded in either dtype of a forward."""
    halves = tmp_path / "halves"
    shutil.copytree(files[0], halves)
    weights = safetensors.torch.load_file(halves / "model.safetensors")
    safetensors.torch.save_file(
        {name: values.half() for name, values in weights.items()},
        halves / "model.safetensors",
        {"format": "pt"},
    )
    for module in (admission, torch_engine):
        monkeypatch.setattr(module, "free_memory", lambda _: 1000)
    windows = [np.arange(9, dtype=np.int32)] * 2
    assert admit_engine(
        Double(files[0], WeightType("float32"), Compute("cpu")), "double", files[0], windows
    ) == pytest.approx(0, abs=1e-6)
    with pytest.raises(InputError, match=r"halves: needs \S+ GB of main memory in bfloat16"):
        admit_engine(
            Double(files[0], WeightType("float32"), Compute("cpu")), "double", halves, windows
        )


def test_torch_needs_no_admission_and_has_no_distance(
    by: Callable[..., ScoringRequest], out: Path
) -> None:
    teach(by("torch"))
    teacher = LogitsFolder(out).description.teacher
    assert (teacher.engine, teacher.quantization, teacher.kl) == ("torch", "none", None)


@pytest.mark.parametrize(
    ("engine", "found"), [(Wrong, r"[0-9.]+ nats"), (Broken, "NaN or Inf")], ids=["wrong", "nan"]
)
def test_an_engine_that_computes_something_else_is_refused_before_it_writes(
    by: Callable[..., ScoringRequest], out: Path, engine: type[Double], found: str
) -> None:
    message = rf"--engine double: .*/model scored by it is {found} from .* \(at most {LIMIT}\)"
    with pytest.raises(RefusedError, match=message) as refused:
        teach(by(engine))
    assert last_state(out) == ("failed", str(refused.value))
    assert not contents(out)
    teach(by("torch"))  # the folder is not the refused engine's
    assert is_whole(out)


def test_an_engine_that_is_wrong_in_batches_alone_is_refused(
    by: Callable[..., ScoringRequest], out: Path
) -> None:
    with pytest.raises(RefusedError, match=r"nats from transformers'"):
        teach(by(WrongWherePadded))
    assert not LogitsFolder(out).is_described


def test_a_model_that_is_replaced_while_it_is_loaded_is_refused(
    files: tuple[Path, Path], out: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(files[0], tmp_path / "model"))
    (model / "manifest.json").unlink(missing_ok=True)
    wanted = assign_request(wish(model, files[1], out))

    def replaced() -> Teacher:
        other = write_teacher(tmp_path / "other", files[1], seed=1)
        (other / "model.safetensors").replace(model / "model.safetensors")
        return load(wanted)

    with pytest.raises(InputError, match="was changed while it was loaded; start again"):
        TeacherRun(wanted, replaced).make_shards()
    assert not LogitsFolder(out).is_described


def test_an_engine_that_is_wrong_on_one_machine_alone_adds_nothing_to_a_folder(
    by: Callable[..., ScoringRequest], out: Path
) -> None:
    teach(by(Double), share=(1, 2))
    before, described = contents(out), (out / "dataset.json").read_bytes()
    with pytest.raises(RefusedError, match="nats from transformers'"):
        teach(by(Wrong), share=(2, 2))
    assert contents(out) == before
    teach(by(Double), share=(2, 2))
    assert is_whole(out)
    assert (out / "dataset.json").read_bytes() == described


def test_two_engines_never_fill_one_folder(by: Callable[..., ScoringRequest], out: Path) -> None:
    late = assign_request(by(Double))  # when nothing was described
    teach(by("torch"), share=(1, 2))
    before = contents(out)
    with pytest.raises(RefusedError, match=r"teacher\.engine is torch there and double here"):
        assign_request(by(Double))
    with pytest.raises(RefusedError, match=r"teacher\.engine is torch there and double here"):
        TeacherRun(late, lambda: load(late), share=(2, 2)).make_shards()
    assert contents(out) == before


def test_two_quantisations_never_fill_one_folder(
    by: Callable[..., ScoringRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    teach(by(Double))
    again = by(Double)
    monkeypatch.setitem(
        ENGINES, "double", replace(ENGINES["double"], facts=EngineFacts(quantization="int8"))
    )
    with pytest.raises(RefusedError, match=r"teacher\.quantization is int4 there and int8 here"):
        assign_request(again)


def test_an_audit_takes_the_engine_that_wrote_the_scores_only_where_torch_cannot_be_opened(
    by: Callable[..., ScoringRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = teach(by(Double))
    size = ForwardSize(BATCH["cpu"], done.description.max_seq_len)
    plan = partial(plan_forward, read_shape(done.model_dir), frozen_setup(4), size)
    need = min(plan(kept, accelerator=False).total for kept in (HEAD_STREAMED, 0, None))

    def choose(free: int) -> str:
        monkeypatch.setattr(torch_engine, "available_bytes", lambda _: free)
        return open_auditor(done.folder, done.model_dir, done.vocabulary, Compute("cpu"))[0]

    assert choose(need) == "torch"
    assert "cannot find its own errors" not in caplog.text
    assert choose(need - 1) == "double"
    assert "cannot find its own errors" in caplog.text


def test_an_engine_that_is_wrong_after_its_admission_is_found_by_the_audit(
    by: Callable[..., ScoringRequest], files: tuple[Path, Path], out: Path
) -> None:
    wanted = by(Wrong, healthy=in_the_pass(by(Double)) - BATCHES)
    done = teach(wanted)
    auditor = open_auditor(done.folder, files[0], done.vocabulary, Compute("cpu"))
    assert auditor[0] == "torch"

    def found(engine: str) -> AuditResult:
        teacher = open_teacher(
            done.model_dir, done.vocabulary, done.description, Compute("cpu"), engine=engine
        )
        return audit_windows(done.folder, teacher, fraction=1, limit=audit_limit("double", engine))

    assert found("torch").is_another_teacher
    by(Wrong)  # the same fault again
    assert not found("double").is_another_teacher


def test_nan_after_the_admission_is_named_with_the_document_and_not_written(
    by: Callable[..., ScoringRequest], out: Path
) -> None:
    with pytest.raises(NonFiniteError, match=r"document \d+, token \d+"):
        teach(by(Broken, healthy=in_the_pass(by(Double))))
    states = {verdict.state for verdict in verify_shards(LogitsFolder(out))}
    assert states == {"whole", "missing"}


def test_an_engine_out_of_memory_gets_smaller_batches(
    by: Callable[..., ScoringRequest], out: Path
) -> None:
    teach(by(Cramped))
    assert is_whole(out)


def _teach_and_be_killed(files: tuple[Path, Path], out: Path, healthy: int) -> None:
    ENGINES["double"] = EngineKind(partial(Killed, healthy=healthy), INT4)
    teach(wish(*files, out, engine="double"))


@pytest.mark.cluster
def test_a_killed_engine_is_replaced_and_nothing_is_lost_or_doubled(
    by: Callable[..., ScoringRequest], files: tuple[Path, Path], out: Path
) -> None:
    healthy = in_the_pass(by(Double))
    process = CONTEXT.Process(target=_teach_and_be_killed, args=(files, out, healthy))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    written = contents(out)
    assert 0 < len(written) < len(LogitsFolder(out).description.shards)
    teach(by(Double))
    assert is_whole(out)
    assert contents(out).items() >= written.items()


def test_flag_and_job_name_the_engines_of_the_table() -> None:
    from trainer.commands.distill.audit import audit
    from trainer.commands.distill.teacher import teacher

    for command in (teacher, audit):
        (flag,) = (each for each in command.params if each.name == "engine")
        assert isinstance(flag.type, click.Choice)
        assert list(flag.type.choices) == list(ENGINES)
    (engines, _) = get_args(TeacherJob.model_fields["engine"].annotation)
    assert list(get_args(engines)) == list(ENGINES)
