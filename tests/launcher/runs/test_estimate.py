"""What a distillation will cost, from the files of its hosts; how a start is refused for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import OverBudgetError
from launcher.hosts.local import LocalConnection
from launcher.hosts.survey import Survey
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.budget import with_budget
from launcher.plan.distillation import place_distillation
from launcher.plan.plan import LaunchPlan
from launcher.plan.plan_context import PlanContext
from launcher.runs.budget.authorisation import authorise_start
from launcher.runs.estimate import estimate_cost
from tests.trainer.small_teacher import SCHEMES, SIZES, write_corpus
from tests.trainer.tiny_logits import tiny_description, tiny_folder
from trainer.config import distill_job
from trainer.config.distill_job import DistillJob
from trainer.data.document_tokens import ReadDocuments
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.distill.teacher.windows import WindowCutter
from trainer.distill.workload import MOST, read_scoring, student_shape
from trainer.init_model import init_model
from trainer.planning.budget.ledger import SpendLedger, SpendRecord
from trainer.planning.cost import Cost

CORES = (Device("cpu", "cpu"),)
CARD = Device("cuda", "GPU-1", "NVIDIA GeForce RTX 4090", 24 << 30)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    corpus = write_corpus(folder / "corpus.jsonl")
    init_model(corpus, folder / "teacher", SIZES)
    return folder


class Start:
    """A distillation of two hosts whose files lie on this machine, at a euro an hour each."""

    def __init__(
        self,
        inputs: Path,
        folder: Path,
        price: float = 1.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        base = Host(
            name="near",
            connection="local",
            devices=CORES,
            cores=2,
            memory=1 << 34,
            price_hour=price,
            currency="EUR",
            state_folder=str(folder),
            share_folder=str(folder),
        )
        self.hosts = [replace(base, student=True), replace(base, name="far", teacher=True)]
        given = {
            "teacher.model": str(inputs / "teacher"),
            "teacher.data": [str(inputs / "corpus.jsonl")],
            "teacher.max_seq_len": 64,
            "student.model": str(inputs / "teacher"),
            "student.output": "out",
            "budget.ceiling": 5,
            "budget.currency": "EUR",
        }
        self.job: DistillJob = distill_job.load_job(None, given | dict(settings or {}))

    def settled(self) -> tuple[LaunchPlan, DistillJob, Survey]:
        setting = PlanContext(
            run_id="r", trainer_command=("t",), state_folder=str(self.folder), routes={}
        )
        plan = place_distillation(self.hosts, self.job, setting)
        job, _ = with_budget(self.job, plan, {}, {})
        connections = {host.name: LocalConnection() for host in self.hosts}
        return plan, job, Survey(hosts=tuple(self.hosts), connections=connections)

    def cost(self, done: int = 0) -> Cost:
        plan, job, found = self.settled()
        cost = estimate_cost(job, plan, found, done)
        assert cost is not None
        return cost

    def ask(self) -> list[str]:
        plan, job, found = self.settled()
        said: list[str] = []
        authorise_start(plan, job, found, said.append)
        return said


def test_all_hosts_are_paid_until_the_slower_one_is_done(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path)
    once = start.cost()
    assert once.money == pytest.approx(2 * once.seconds / 3600)
    many = Start(inputs, tmp_path, settings={"student.training.epochs": 1000})
    assert many.cost().seconds == pytest.approx(1000 * once.seconds, rel=0.01)
    # A student on a card waits for the teacher on two cores.
    start.hosts[0] = replace(start.hosts[0], devices=(CARD,))
    waits = start.cost().seconds
    assert 0.2 * once.seconds < waits < 0.5 * once.seconds  # a forward of a step's three
    start.hosts[1] = replace(start.hosts[1], cores=4)
    assert start.cost().seconds == pytest.approx(waits / 2)


def test_two_on_one_card_share_it(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path, settings={"teacher.backend": "cuda"})
    start.hosts = [replace(host, devices=(CARD,)) for host in start.hosts]
    apart = start.cost().seconds
    start.hosts = [replace(start.hosts[0], teacher=True)]
    assert start.cost().seconds == pytest.approx(2 * apart)


def test_a_new_student_has_the_size_of_its_config(inputs: Path, tmp_path: Path) -> None:
    tree = json.loads((inputs / "teacher" / "config.json").read_bytes())
    (tmp_path / "wide.json").write_text(json.dumps({**tree, "intermediate_size": 4096}))
    small = Start(inputs, tmp_path)
    wide = Start(inputs, tmp_path, settings={"teacher.tokenizer": str(inputs / "teacher")})
    fresh = wide.job.student.model_copy(update={"model": None, "config": "wide.json"})
    wide.job = wide.job.model_copy(update={"student": fresh})
    assert wide.cost().seconds > 2 * small.cost().seconds
    with_own = student_shape(None, str(tmp_path / "wide.json"), inputs / "teacher")
    assert (with_own.inner, with_own.vocab) == (4096, tree["vocab_size"])


def test_a_ceiling_below_the_estimate_is_refused(inputs: Path, tmp_path: Path) -> None:
    (said,) = Start(inputs, tmp_path).ask()
    assert re.match(
        r"budget: 0\.0*[1-9]\d* EUR are planned for \d s; the ceiling is 5\.00 EUR", said
    )
    with pytest.raises(OverBudgetError, match=r"EUR are planned .* ceiling is 5\.00 EUR: raise it"):
        Start(inputs, tmp_path, price=1e9).ask()


@pytest.mark.parametrize("name", ["near", "far"])
def test_a_rented_host_without_a_price_is_refused(inputs: Path, tmp_path: Path, name: str) -> None:
    start = Start(inputs, tmp_path)
    start.hosts = [
        replace(host, price_hour=None, rented=True) if host.name == name else host
        for host in start.hosts
    ]
    with pytest.raises(OverBudgetError, match=f"host {name} is rented"):
        start.ask()


def test_what_is_done_is_not_planned_again(inputs: Path, tmp_path: Path) -> None:
    tiny_folder(tmp_path / "logits" / "distill", tiny_description(SCHEMES["topk"]))
    steps: dict[str, Any] = {"student.training.max_steps": 100}
    start = Start(inputs, tmp_path, 1e7, steps)
    whole = start.cost()
    assert start.cost(50).seconds == pytest.approx(whole.seconds / 2)
    assert start.cost(100).seconds == start.cost(101).seconds == 0
    more = Start(inputs, tmp_path, settings={"student.training.max_steps": 150})
    assert more.cost(100).seconds == pytest.approx(whole.seconds / 2)
    dear = 2e7 * whole.seconds / 3600
    steps["budget.ceiling"] = 1 + dear / 2
    start = Start(inputs, tmp_path, 1e7, steps)
    with pytest.raises(OverBudgetError, match="are planned"):
        start.ask()
    record = SpendRecord(
        run_id="r",
        host="near",
        until=1,
        seconds=1,
        kwh=0,
        measured_seconds=0,
        cost=0.5,
        currency="EUR",
    )
    SpendLedger(tmp_path / "spend.jsonl").append_records([record])
    status = {"schema": "motley.status/2", "run_id": "r", "step": 51, "total_steps": 100}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "status.json").write_text(json.dumps(status))
    assert start.ask()[0].startswith("budget: 0.50 EUR were spent, and ")


def test_what_cannot_be_planned_is_said(inputs: Path, tmp_path: Path) -> None:
    start = Start(inputs, tmp_path, settings={"teacher.data": [str(tmp_path / "absent")]})
    assert "cannot be planned" in start.ask()[0]
    hole = tmp_path / "texts"
    hole.mkdir()
    with (hole / "huge.txt").open("wb") as file:
        file.truncate(MOST + 1)
    start = Start(inputs, tmp_path, settings={"teacher.data": [str(hole)]})
    assert "cannot be planned" in start.ask()[0]
    own = {"student.distillation.on_policy.prompts": str(inputs / "corpus.jsonl")}
    assert "cannot be planned" in Start(inputs, tmp_path, settings=own).ask()[0]
    odd = Device("cuda", "GPU-1", "Odd Card", 8 << 30)
    start = Start(inputs, tmp_path)
    start.hosts[0] = replace(start.hosts[0], devices=(odd,))
    assert "cannot be planned" in start.ask()[0]


def test_a_described_folder_is_taken_at_its_word(inputs: Path, tmp_path: Path) -> None:
    """Its shards are counted, and those that are there are not scored again."""
    described = tiny_description(SCHEMES["topk"])
    folder = tiny_folder(tmp_path / "logits", described, [0])
    model, absent = inputs / "teacher", [Path("/nowhere")]
    found = read_scoring(model, absent, model, folder.path)
    assert (found.tokens, found.windows) == (described.tokens, described.windows)
    assert found.shards == len(described.shards) == found.missing + 1


def test_a_corpus_is_counted_as_the_teacher_will(inputs: Path, tmp_path: Path) -> None:
    model, corpus = inputs / "teacher", [inputs / "corpus.jsonl"]
    windows = WindowCutter(ReadDocuments(Documents(corpus), Encoder(model)), 64)
    plans = windows.plan_shards(windows.split_documents(2000))
    found = read_scoring(model, corpus, model, tmp_path / "none", 64, 2000)
    assert found.tokens == sum(plan.tokens for plan in plans)
    assert found.windows == sum(plan.windows for plan in plans)
    assert found.shards == found.missing == len(plans)


def test_a_corpus_is_counted_by_its_names_of_keys(inputs: Path, tmp_path: Path) -> None:
    model, logits = inputs / "teacher", tmp_path / "none"
    for key in ("text", "body"):
        lines = (json.dumps({key: f"echo {'hello ' * number}"}) + "\n" for number in range(30))
        (tmp_path / f"{key}.jsonl").write_text("".join(lines))
    plain, renamed = tmp_path / "text.jsonl", tmp_path / "body.jsonl"
    found = read_scoring(model, [renamed], model, logits, 64, columns={"text": "body"})
    assert found == read_scoring(model, [plain], model, logits, 64)
