"""A student on hand-made logits: what it learns, writes, refuses, and goes on from."""

from __future__ import annotations

import copy
import gc
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.bigram_teacher import BigramTeacher
from tests.trainer.course import Course
from tests.trainer.data.datasets import load_dataset
from tests.trainer.small_model import SIZES, write_data
from tests.trainer.small_teacher import teach, wish, write_padded
from trainer.checkpoint.reader import find_checkpoint, read_progress
from trainer.checkpoint.store import Restored
from trainer.checkpoint.trained_model import load_trained
from trainer.config.distillation import DistillationConfig
from trainer.data.encoder import IGNORED
from trainer.data.shapes import Sample
from trainer.distill.logits.scores import Scheme
from trainer.distill.student.inputs import FreshStudent
from trainer.distill.student.prefetch import Preparation
from trainer.evaluate.generation import complete_samples
from trainer.evaluate.scoring import score_file
from trainer.init_model import init_model
from trainer.model.initialization import read_tensor
from trainer.model.safetensors_headers import read_headers
from trainer.planning.budget.guard import BudgetGuard
from trainer.planning.budget.ledger import SpendLedger
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.run.composition import student_role
from trainer.system.errors import BudgetStopError, InputError, NonFiniteError, RefusedError
from trainer.tracking.metrics import read_metrics
from trainer.tracking.status import read_status

if TYPE_CHECKING:
    from trainer.distill.student.loop import Student


CPU = Compute("cpu", threads=1)


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
    assert (status["state"], status["step"]) == ("completed", len(steps))
    (worker,) = status["workers"]
    assert (worker["rank"], worker["device"], worker["state"]) == (0, "cpu", "active")


def test_its_budget_stops_it_in_order_and_a_higher_ceiling_goes_on(
    model: Path, logits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"ceiling": 1000, "currency": "EUR", "hosts": [{"name": "rack", "price_hour": 3600}]}
    course = Course(tmp_path / "out", model, logits, budget=budget)
    looks = BudgetGuard.check_budget

    def at_step_6(self: BudgetGuard, now: float) -> str | None:
        return "budget.ceiling: spent" if self.next_checkpoint == 8 else looks(self, now)

    with monkeypatch.context() as dear:
        dear.setattr(BudgetGuard, "check_budget", at_step_6)
        dear.setattr(student_role, "LOOK_EVERY", 0.001)
        assert course.run() == 9
    status = read_status(course.output / "status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", 9)
    assert status["reason"] == "budget.ceiling: spent"
    stopped = len(course.steps())
    assert 4 <= stopped < 16
    assert status["checkpoint"]["step"] == stopped
    ledger = SpendLedger(course.output / "spend.jsonl")
    before = sum(record.cost for record in ledger.read_records())
    assert before == pytest.approx(status["budget"]["spent"], abs=1e-4)
    assert ledger.read_records()[-1].is_final

    course.settings["budget"] = budget | {"ceiling": 1}
    with pytest.raises(BudgetStopError, match=r"^budget\.ceiling: "):
        course.run()
    assert len(course.steps()) == stopped
    course.settings["budget"] = budget | {"ceiling": 100_000}
    assert course.run() == 0
    assert course.steps("step") == list(range(1, 17))
    after = read_status(course.output / "status.json")["budget"]["spent"]
    assert after == pytest.approx(sum(record.cost for record in ledger.read_records()), abs=1e-4)
    assert after > before


def test_its_budget_counts_while_it_waits_for_a_teacher(model: Path, tmp_path: Path) -> None:
    budget = {"ceiling": 1, "currency": "EUR", "hosts": [{"name": "rack", "price_hour": 3600}]}
    course = Course(tmp_path / "out", model, tmp_path / "nothing", budget=budget)
    with pytest.raises(BudgetStopError, match=r"^budget\.ceiling: ") as stopped:
        course.run()
    assert stopped.value.exit_code == 9
    status = read_status(course.output / "status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", 9)
    assert SpendLedger(course.output / "spend.jsonl").read_records()[-1].is_final


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
    ours = score_file(trained, texts, CPU)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.path)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(trained.path)
    ids = load_dataset(texts, trained.path, "causal-lm", None, 512)[0].input_ids
    assert tokenizer.decode(ids).endswith("<|endoftext|>")
    import torch

    batch = torch.tensor(np.array([ids]), dtype=torch.int64)
    with torch.no_grad():
        loss = theirs(input_ids=batch, labels=batch).loss
    assert ours.loss == pytest.approx(float(loss), rel=1e-5)
    (completion,) = complete_samples(trained, [Sample("rm -rf")], 6, Sampling(), CPU)
    prompt = tokenizer("rm -rf", return_tensors="pt")
    made = theirs.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    assert tokenizer.decode(made) == completion.prompt + completion.text


def test_it_answers_prompts(model: Path, logits: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "rm -rf"}\n')
    asks: dict[str, Any] = {
        "training__sample_prompts": str(tmp_path / "prompts.jsonl"),
        "training__sample_every": 4,
        "training__epochs": 1,
    }
    course = Course(tmp_path / "out", model, logits, **asks)
    assert course.run() == 0
    records = read_metrics(course.output / "metrics.jsonl")
    answers = {each["step"]: each["text"] for each in records if each["kind"] == "answer"}
    assert list(answers) == [0, 4, 8]
    for folder, step in ((model, 0), (course.output, 8)):
        (made,) = complete_samples(load_trained(folder), [Sample("rm -rf")], 64, Sampling(), CPU)
        assert made.text == answers[step]


def test_nothing_keeps_the_restored_state(
    model: Path, logits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is three times the weights."""
    course = Course(tmp_path / "out", model, logits)
    course.run_until(4)
    kept: list[object] = []
    from trainer.distill.student.loop import Student

    run = Student.run

    def counting(student: Student) -> str:
        gc.collect()
        kept.extend(found for found in gc.get_objects() if type(found) is Restored)
        assert student.step > 0
        return run(student)

    monkeypatch.setattr(Student, "run", counting)
    assert course.run() == 0
    assert not kept


def test_a_finished_run_has_nothing_to_do(model: Path, logits: Path, tmp_path: Path) -> None:
    course = Course(tmp_path / "out", model, logits, training__max_steps=3)
    assert [course.run(), course.run()] == [0, 0]
    assert course.steps("step") == [1, 2, 3]
    assert len(course.events("checkpoint")) == 1


def test_a_lora_student(model: Path, logits: Path, data: Path, tmp_path: Path) -> None:
    course = Course(tmp_path / "out", model, logits, method="lora", training__epochs=4)
    assert course.run() == 0
    first, *_, last = np.array(course.steps("kl")).reshape(4, -1).mean(axis=1)
    assert last < first
    assert (find_checkpoint(course.output) / "adapter_model.safetensors").is_file()
    assert score_file(load_trained(course.output), data, CPU).loss > 0


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


@pytest.mark.long
@pytest.mark.needs("g++")
@pytest.mark.timeout(
    900
)  # most of a minute of a compiler, on a machine that has nothing else to do
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own ways
def test_compiled_layers_change_nothing_but_rounding(
    model: Path, logits: Path, tmp_path: Path
) -> None:
    from torch._inductor import config

    figures: list[list[float]] = []
    for compiled in (False, True):
        course = Course(tmp_path / str(compiled), model, logits, training__max_steps=1)
        # Neither processes that import torch to wait for the compiler, nor a trial of each kind of
        # vector that the processor has: a fifth of the time.
        with config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
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
        tmp_path / "out",
        model,
        logits,
        training__max_steps=5,
        distillation__alpha=0.8,
        distillation__alpha_final=0.0,
    )
    assert course.run() == 0
    np.testing.assert_allclose(course.steps("alpha"), [0.8, 0.6, 0.4, 0.2, 0.0], atol=1e-12)


def test_validation_decides_about_the_best(
    model: Path, logits: Path, data: Path, tmp_path: Path
) -> None:
    course = Course(
        tmp_path / "out",
        model,
        logits,
        data__validation=str(data),
        training__max_steps=6,
        training__evaluate_every=2,
    )
    assert course.run() == 0
    records = read_metrics(course.output / "metrics.jsonl")
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "validation"}
    assert list(losses) == [2, 4, 6]
    best = find_checkpoint(course.output)
    assert read_progress(best).step == min(losses, key=lambda step: losses[step])
    assert score_file(load_trained(best), data, CPU).loss == pytest.approx(
        min(losses.values()), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_halts_before_the_update(model: Path, teacher: BigramTeacher, tmp_path: Path) -> None:
    """The run stands still at the last checkpoint before it."""
    poisoned = copy.deepcopy(teacher)
    for window in poisoned.written[5]:
        assert window.scores.logprobs is not None
        window.scores.logprobs[:] = -np.inf  # each alone a possible value
    logits = poisoned.write(tmp_path / "logits").path
    course = Course(tmp_path / "out", model, logits, checkpoint__every=1, training__epochs=1)
    with pytest.raises(NonFiniteError, match=r"step \d: .* the run is halted before the update"):
        course.run()
    done = course.steps("step")[-1]
    kept = find_checkpoint(course.output)
    assert read_progress(kept).step == done
    assert all(np.isfinite(read_tensor(each)).all() for each in read_headers(kept).values())
    assert read_status(course.output / "status.json")["state"] == "failed"


def test_another_tokenizer_is_refused_with_both_digests(
    teacher: BigramTeacher, logits: Path, tmp_path: Path
) -> None:
    other = init_model(
        write_data(tmp_path / "other.jsonl", count=7), tmp_path / "other", SIZES, seed=0
    )
    from trainer.distill.tokenizer.vocabulary import tokenizer_digest

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
    with pytest.raises(RefusedError, match=f"has {size - 1} tokens, .* makes {size}"):
        Course(tmp_path / "out", small, logits).run()


def test_teacher_and_student_may_be_padded_differently(model: Path, tmp_path: Path) -> None:
    """Sizes of one family have one tokenizer and other numbers of rows beyond it."""
    teacher, student = (write_padded(tmp_path / str(rows), model, rows) for rows in (64, 32))
    logits = BigramTeacher(teacher, shards=2).write(tmp_path / "logits").path
    course = Course(tmp_path / "out", student, logits, training__max_steps=2)
    assert course.run() == 0
    assert len(course.steps("kl")) == 2
    assert np.all(np.isfinite(course.steps("kl")))


def test_prompts_are_context_and_not_learned(model: Path, tmp_path: Path) -> None:
    """The first window is of the prompt alone: its step has nothing to learn."""
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "Add 1. " * 9}, {"role": "assistant", "content": "x"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    logits = teach(wish(model, data, tmp_path / "logits", max_seq_len=24)).folder
    windows = [window for plan in logits.plans for window in logits.read_shard(plan.number)]
    scored = [int((np.diff(window.scores.offsets) > 0).sum()) for window in windows]
    assert scored[0] == 0 < sum(scored) < 12
    course = Course(tmp_path / "out", model, logits.path, training__batch_size=1)
    assert course.run() == 0
    losses = course.steps("loss")
    assert sorted(loss is None for loss in losses) == sorted(2 * [not each for each in scored])
    prepare = Preparation(logits.description.scheme, DistillationConfig(alpha=0.5), 24)
    for window, count in zip(windows, scored, strict=True):
        labels = prepare(window).labels
        assert isinstance(labels, np.ndarray)
        assert int((labels != IGNORED).sum()) == count


def test_sampled_logits_are_not_re_tempered(model: Path, tmp_path: Path) -> None:
    scheme = Scheme(kind="sampled", samples=20)
    logits = BigramTeacher(model, shards=1, scheme=scheme).write(tmp_path / "logits").path
    with pytest.raises(InputError, match=r"temperature 2: .*cannot be converted"):
        Course(tmp_path / "out", model, logits, distillation__temperature=2.0).run()
    assert not (tmp_path / "out" / "metrics.jsonl").exists(), "refused before training"


def test_other_logits_do_not_continue_a_run(model: Path, logits: Path, tmp_path: Path) -> None:
    Course(tmp_path / "out", model, logits, training__max_steps=2).run()
    other = BigramTeacher(model, shards=2).write(tmp_path / "other").path
    with pytest.raises(InputError, match="its data has changed"):
        Course(tmp_path / "out", model, other).run()
    with pytest.raises(InputError, match="its settings have changed"):
        Course(tmp_path / "out", model, logits, distillation__alpha=0.1).run()
