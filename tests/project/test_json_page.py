"""docs/json.md names every key that --json prints and that the files have."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest

from launcher.agent.checks.finding import Result
from launcher.discovery.links import MeasuredLink
from launcher.runs.budget.spending import IdleHost, SpendTotal
from launcher.runs.records.queue_records import JobEnd
from tests import ROOT
from trainer.data.inspection import Example, Span
from trainer.data.survey import Repetitions
from trainer.distill.logits.heartbeat import TeacherState
from trainer.distill.logits.survey import Contents, LogitsSurvey
from trainer.distill.teacher.audit import AuditResult
from trainer.distill.tokenizer.trim import TrimResult
from trainer.evaluate.generation import Completion
from trainer.tracking.status import CheckpointStatus, Status, ValidationStatus, WorkerStatus


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        *(("status/2", kind) for kind in (Status, WorkerStatus, CheckpointStatus)),
        ("status/2", ValidationStatus),
        ("cluster.status/2", IdleHost),
        ("spend/2", SpendTotal),
        ("queue/2", JobEnd),
        ("discovery/2", MeasuredLink),
        ("doctor/1", Result),
        *(("data/2", kind) for kind in (Example, Span, Repetitions)),
        ("trimming/2", TrimResult),
        *(("logits.inspection/2", kind) for kind in (LogitsSurvey, Contents, TeacherState)),
        ("audit/1", AuditResult),
        ("completion/1", Completion),
    ],
)
def test_every_printed_key_is_on_the_page(schema: str, kind: type) -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `{re.escape(schema)}` \|(.*)$", page, re.MULTILINE)
    named = {
        key for row in rows for path in re.findall(r"`([\w.]+)`", row) for key in path.split(".")
    }
    printed = [part.name for part in fields(kind)] if is_dataclass(kind) else kind.__annotations__
    assert [key for key in printed if key not in named] == []
