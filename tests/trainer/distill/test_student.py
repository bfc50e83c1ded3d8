"""A student on hand-made logits: what it learns, writes, refuses, waits for and goes on from."""

from __future__ import annotations

import copy
import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bigram_teacher import BigramTeacher
from small_model import SIZES, write_data, write_model

from trainer.checkpoint import find_checkpoint, read_progress
from trainer.config import RunConfig, load
from trainer.data.samples import Sample
from trainer.data.tokens import load_dataset
from trainer.distill.stopping import Stop
from trainer.distill.student_inputs import FreshStudent
from trainer.distill.student_run import Device, run_student
from trainer.errors import InputError, NonFiniteError, RefusedError, UnreachableError
from trainer.generation import complete
from trainer.init_model import init_model
from trainer.logits.scores import Scheme
from trainer.metrics import read_metrics
from trainer.replica.sampling import Sampling
from trainer.scoring import score
from trainer.status import read_status
from trainer.trained import load_trained


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("student") / "model", data)


@pytest.fixture(scope="module")
def teacher(model: Path) -> BigramTeacher:
    return BigramTeacher(model, shards=6, windows=6)


@pytest.fixture
def logits(teacher: BigramTeacher, tmp_path: Path) -> Path:
    return teacher.write(tmp_path / "logits").path


class Course:
    """One run of a student, in its own output folder."""

    def __init__(self, folder: Path, model: Path, logits: Path, **settings: Any) -> None:
        self.output = folder
        self.settings: dict[str, Any] = {
            "output": str(folder),
            "model.path": str(model),
            "data.train": str(logits),
            "optimizer.learning_rate": 1e-2,
            "training.batch_size": 5,
            "training.epochs": 2,
            "checkpoint.every": 4,
        }
        self.settings |= {key.replace("__", "."): value for key, value in settings.items()}

    @property
    def config(self) -> RunConfig:
        return load("student", self.settings)

    def run(
        self,
        stop: Stop | None = None,
        timeout: float = 30.0,
        compiled: bool = False,
        fresh: FreshStudent | None = None,
    ) -> int:
        return run_student(
            self.config,
            "run",
            Device(backend="cpu", threads=1, compiled=compiled),
            teacher_timeout=timeout,
            stop=Stop() if stop is None else stop,
            fresh=fresh,
        )

    def run_until(self, step: int) -> None:
        """Stop once a step was done, as a signal would."""
        stop = StopsAt(self.output, step)
        assert self.run(stop) == 0
        assert stop.reason

    def steps(self, key: str = "loss") -> list[Any]:
        records = read_metrics(self.output / "metrics.jsonl")
        return [record[key] for record in records if record["kind"] == "step"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        records = read_metrics(self.output / "metrics.jsonl")
        return [record for record in records if record.get("event") == kind]

    def weights(self) -> np.ndarray:
        return load_trained(self.output).weights


class StopsAt(Stop):
    """Asks for an end when the metrics show a step."""

    def __init__(self, output: Path, step: int) -> None:
        super().__init__()
        self._metrics, self._step = output / "metrics.jsonl", step

    def __bool__(self) -> bool:
        if self._metrics.exists() and f'"step": {self._step},' in self._metrics.read_text():
            self.ask("enough")
        return bool(self.reason)


def test_it_learns_what_the_teacher_knows(
    model: Path, logits: Path, teacher: BigramTeacher, tmp_path: Path
) -> None:
    course = Course(tmp_path / "out", model, logits, training__epochs=8)
    assert course.run() == 0
    kl, steps = course.steps("kl"), course.steps("step")
    assert steps == list(range(1, 8 * math.ceil(36 / 5) + 1))
    assert np.mean(kl[-8:]) < 0.7 * np.mean(kl[:8])
    alpha = np.array(course.steps("alpha"))
    mixed = alpha * kl + (1 - alpha) * np.array(course.steps("ce"))
    np.testing.assert_allclose(course.steps("loss"), mixed, rtol=1e-5)
    status = read_status(course.output / "status.json")
    assert (status["state"], status["step"]) == ("finished", len(steps))
    (worker,) = status["workers"]
    assert (worker["rank"], worker["device"], worker["state"]) == (0, "cpu", "active")


def test_a_checkpoint_is_an_ordinary_model(
    model: Path, logits: Path, data: Path, tmp_path: Path
) -> None:
    """Motley's own commands and transformers open it, and say the same of a text."""
    import transformers

    course = Course(tmp_path / "out", model, logits, training__epochs=1)
    assert course.run() == 0
    texts = tmp_path / "texts.jsonl"
    texts.write_text(data.read_text().splitlines()[0] + "\n")
    trained = load_trained(course.output)
    ours = score(trained, texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained.path)
    ids = load_dataset(texts, trained.path, "causal-lm", None, 512)[0].input_ids
    assert tokenizer.decode(ids).endswith("<|endoftext|>")
    batch = torch.tensor(np.array([ids]), dtype=torch.int64)
    with torch.no_grad():
        loss = theirs(input_ids=batch, labels=batch).loss
    assert ours.loss == pytest.approx(float(loss), rel=1e-5)
    (completion,) = complete(trained, [Sample("rm -rf")], 6, Sampling(), "cpu", threads=1)
    prompt = tokenizer("rm -rf", return_tensors="pt")
    made = theirs.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    assert tokenizer.decode(made) == completion.prompt + completion.text


def test_a_stopped_run_goes_on_to_the_bit(model: Path, logits: Path, tmp_path: Path) -> None:
    straight = Course(tmp_path / "straight", model, logits)
    assert straight.run() == 0
    stopped = Course(tmp_path / "stopped", model, logits)
    stopped.run_until(3)
    stopped.run_until(11)  # in the second epoch
    assert stopped.run() == 0
    assert len(stopped.events("resumed")) == 2
    for key in ("step", "epoch", "loss", "ce", "kl", "grad_norm", "learning_rate", "alpha"):
        assert stopped.steps(key) == straight.steps(key)
    np.testing.assert_array_equal(stopped.weights(), straight.weights())


def test_a_finished_run_has_nothing_to_do(model: Path, logits: Path, tmp_path: Path) -> None:
    course = Course(tmp_path / "out", model, logits, training__max_steps=3)
    assert [course.run(), course.run()] == [0, 0]
    assert course.steps("step") == [1, 2, 3]
    assert len(course.events("checkpoint")) == 1


def test_it_trains_while_the_teacher_writes(
    model: Path, teacher: BigramTeacher, logits: Path, tmp_path: Path
) -> None:
    """Nothing is there at first; shards come late and out of order; the result is the same."""
    whole = Course(tmp_path / "whole", model, logits)
    assert whole.run() == 0
    growing = Course(tmp_path / "growing", model, tmp_path / "growing-logits")

    def write() -> None:
        for number in (3, 1, 0, 2, 5, 4):
            time_passes.wait(0.5)
            teacher.write(tmp_path / "growing-logits", [number])

    time_passes = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    assert growing.run() == 0
    writer.join()
    assert growing.steps() == whole.steps()
    reasons = [event["reason"] for event in growing.events("waiting")]
    assert any("for shard-0000" in reason for reason in reasons)
    assert max(growing.steps("waited_seconds")) > 0.3


def test_a_teacher_that_never_comes(model: Path, tmp_path: Path) -> None:
    course = Course(tmp_path / "out", model, tmp_path / "logits")
    with pytest.raises(UnreachableError, match=r"no teacher has begun here within 0\.1 s"):
        course.run(timeout=0.1)
    status = read_status(course.output / "status.json")
    assert status["state"] == "waiting"
    assert "dataset.json" in status["reason"]


def test_a_dead_teacher_is_named_and_what_was_learned_is_saved(
    model: Path, teacher: BigramTeacher, tmp_path: Path
) -> None:
    teacher.write(tmp_path / "logits", range(4))
    course = Course(tmp_path / "out", model, tmp_path / "logits", checkpoint__every=1000)
    with pytest.raises(UnreachableError, match="shard-00004 is missing"):
        course.run(timeout=0.5)
    learned = course.steps("step")[-1]
    assert learned == 4 * 6 // 5
    assert read_progress(find_checkpoint(course.output)).step == learned
    status = read_status(course.output / "status.json")
    assert status["state"] == "failed"
    assert "shard-00004" in status["reason"]
    teacher.write(tmp_path / "logits", [4, 5])
    assert course.run() == 0
    assert course.steps("step")[learned:] == list(range(learned + 1, 17))


def test_a_damaged_shard_comes_once_and_last(
    model: Path, teacher: BigramTeacher, logits: Path, tmp_path: Path
) -> None:
    file = logits / "shard-00001" / "logits.parquet"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    course = Course(tmp_path / "out", model, logits, training__epochs=1, training__batch_size=6)

    def redo() -> None:
        while not (logits / "requests" / "shard-00001.json").exists():
            time_passes.wait(0.05)
        teacher.write(logits, [1])

    time_passes = threading.Event()
    writer = threading.Thread(target=redo)
    writer.start()
    assert course.run() == 0
    writer.join()
    assert len(list((logits / "quarantine").iterdir())) == 1
    (event,) = course.events("quarantined")
    assert "shard-00001/logits.parquet: its bytes are not those in the manifest" in event["reason"]
    assert len(course.steps()) == 6
    assert not list((logits / "requests").iterdir())


def test_a_lora_student(model: Path, logits: Path, data: Path, tmp_path: Path) -> None:
    course = Course(tmp_path / "out", model, logits, method="lora", training__epochs=4)
    assert course.run() == 0
    first, *_, last = np.array(course.steps("kl")).reshape(4, -1).mean(axis=1)
    assert last < first
    assert (find_checkpoint(course.output) / "adapter_model.safetensors").is_file()
    assert score(load_trained(course.output), data).loss > 0


@pytest.mark.parametrize("setting", [{"training__micro_batch_size": 1}, {"training__pack": False}])
def test_how_a_batch_is_cut_changes_nothing_but_rounding(
    model: Path, logits: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    losses: list[list[float]] = []
    for name, settings in (("usual", {}), ("other", setting)):
        course = Course(tmp_path / name, model, logits, training__max_steps=4, **settings)
        assert course.run() == 0
        losses.append(course.steps())
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(
    900
)  # most of a minute of a compiler, on a machine that has nothing else to do
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own ways
def test_compiled_layers_change_nothing_but_rounding(
    model: Path, logits: Path, tmp_path: Path
) -> None:
    figures: list[list[float]] = []
    for compiled in (False, True):
        course = Course(tmp_path / str(compiled), model, logits, training__max_steps=1)
        assert course.run(compiled=compiled) == 0
        figures.append(course.steps("loss") + course.steps("kl") + course.steps("grad_norm"))
    np.testing.assert_allclose(*figures, rtol=1e-4)


def test_a_new_model_is_made_once(model: Path, logits: Path, data: Path, tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    config = json.loads((model / "config.json").read_text())
    shape.write_text(json.dumps({**config, "hidden_size": 16, "vocab_size": 9999}))
    new = tmp_path / "out" / "student"
    course = Course(tmp_path / "out", new, logits, training__max_steps=2)
    fresh = FreshStudent(shape=str(shape), tokenizer_dir=model)
    assert [course.run(fresh=fresh), course.run(fresh=fresh)] == [0, 0]
    assert course.steps("step") == [1, 2]
    assert load_trained(course.output).layout.size < load_trained(model).layout.size
    shape.write_text(json.dumps({**config, "hidden_size": 24}))
    with pytest.raises(InputError, match="is another model than"):
        course.run(fresh=fresh)


def test_alpha_moves_in_a_straight_line(model: Path, logits: Path, tmp_path: Path) -> None:
    course = Course(
        tmp_path / "out", model, logits, training__max_steps=5, distillation__alpha=0.8,
        distillation__alpha_final=0.0,
    )  # fmt: skip
    assert course.run() == 0
    np.testing.assert_allclose(course.steps("alpha"), [0.8, 0.6, 0.4, 0.2, 0.0], atol=1e-12)


def test_validation_decides_about_the_best(
    model: Path, logits: Path, data: Path, tmp_path: Path
) -> None:
    course = Course(
        tmp_path / "out", model, logits, data__validation=str(data), training__max_steps=6,
        training__evaluate_every=2,
    )  # fmt: skip
    assert course.run() == 0
    records = read_metrics(course.output / "metrics.jsonl")
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "validation"}
    assert list(losses) == [2, 4, 6]
    best = find_checkpoint(course.output)
    assert read_progress(best).step == min(losses, key=lambda step: losses[step])
    assert score(load_trained(best), data).loss == pytest.approx(min(losses.values()), rel=1e-5)


def test_nan_halts_before_the_update(model: Path, teacher: BigramTeacher, tmp_path: Path) -> None:
    """The run stands still at the last checkpoint before it."""
    poisoned = copy.deepcopy(teacher)
    for window in poisoned.written[5]:
        assert window.scores.logprobs is not None
        window.scores.logprobs[:] = np.nan
    logits = poisoned.write(tmp_path / "logits").path
    course = Course(tmp_path / "out", model, logits, checkpoint__every=1, training__epochs=1)
    with pytest.raises(NonFiniteError, match=r"step \d: .* the run is halted before the update"):
        course.run()
    done = course.steps("step")[-1]
    kept = find_checkpoint(course.output)
    assert read_progress(kept).step == done
    assert np.isfinite(load_trained(kept).weights).all()
    assert read_status(course.output / "status.json")["state"] == "failed"


def test_another_tokenizer_is_refused_with_both_digests(
    teacher: BigramTeacher, logits: Path, tmp_path: Path
) -> None:
    other = init_model(
        write_data(tmp_path / "other.jsonl", count=7), tmp_path / "other", SIZES, seed=0
    )
    from trainer.distill.vocabulary import tokenizer_digest

    theirs, ours = teacher.description.tokenizer.digest[:16], tokenizer_digest(other)[:16]
    with pytest.raises(RefusedError, match=f"{ours}.*{theirs}"):
        Course(tmp_path / "out", other, logits).run()


def test_a_model_with_too_few_embeddings_is_refused(
    model: Path, logits: Path, tmp_path: Path
) -> None:
    small = shutil.copytree(model, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    size = config["vocab_size"]
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": size - 1}))
    with pytest.raises(RefusedError, match=f"knows {size - 1} tokens, .* makes {size}"):
        Course(tmp_path / "out", small, logits).run()


def test_sampled_logits_are_not_re_tempered(model: Path, tmp_path: Path) -> None:
    scheme = Scheme(kind="sampled", samples=20)
    logits = BigramTeacher(model, shards=1, scheme=scheme).write(tmp_path / "logits").path
    with pytest.raises(InputError, match=r"temperature 2: .*cannot be re-tempered"):
        Course(tmp_path / "out", model, logits, distillation__temperature=2.0).run()
    assert not (tmp_path / "out" / "metrics.jsonl").exists(), "refused before training"


def test_other_logits_do_not_continue_a_run(model: Path, logits: Path, tmp_path: Path) -> None:
    Course(tmp_path / "out", model, logits, training__max_steps=2).run()
    other = BigramTeacher(model, shards=2).write(tmp_path / "other").path
    with pytest.raises(InputError, match="its data has changed"):
        Course(tmp_path / "out", model, other).run()
    with pytest.raises(InputError, match="its settings have changed"):
        Course(tmp_path / "out", model, logits, distillation__alpha=0.1).run()
