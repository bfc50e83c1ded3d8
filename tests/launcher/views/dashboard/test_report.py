"""The report of a run: what it says, what it admits to lack, and that hosts' texts stay texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import run
from launcher.runs.output_run import read_output
from launcher.runs.records.registry import Registry
from launcher.views.dashboard.report import make_report
from tests.launcher.views.dashboard.recorded_run import (
    HOSTILE,
    RUN_ID,
    TAUGHT_ID,
    RecordedDistillation,
    RecordedRun,
)

pytestmark = pytest.mark.usefixtures("own_state")


def report_of(run_id: str) -> dict[str, Any]:
    registry = Registry.for_this_user()
    return make_report(registry, registry.get_run(run_id)).state["report"]


def test_what_was_trained_by_whom_and_what_it_survived(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "state").finish(tmp_path / "state")
    found = report_of(RUN_ID)
    facts = dict(found["facts"])
    assert facts["model"] == HOSTILE
    assert facts["steps"] == "10 of 20"
    assert facts["host localhost"].startswith(f"worker-0 on CPU {HOSTILE}, worker-1 on ")
    assert facts["checkpoint"].endswith("checkpoints/best (step 10)")
    assert dict(found["results"]) == {
        "state": "stopped at 10/20",
        "loss of the last step": "0.2000",
        "validation loss": "0.7500 at step 10",
        "accuracy": "0.5000",
        "samples counted": "120, each exactly once",
        "tokens": f"{sum(round((1000 + n) * 0.5) for n in range(1, 11)):,}",
        "weights agree": f"1 proof, the last of 3 workers at step 10: {'5f' * 32}",
        "share of worker 0": "37%",
        "share of worker 1": "27%",
        "share of worker 2": "37%",
    }
    assert found["classes"] == [HOSTILE, "safe"]
    assert found["confusion"] == (10, [[3, 1], [2, 4]])
    # Lost just before step 4 is committed, and back just before step 6 is.
    assert [(f["step"], f["delay_seconds"], f["rejoin_seconds"]) for f in found["faults"]] == [
        (4, 0.0, 1.0)
    ]
    assert dict(found["costs"]) == {
        "bytes exchanged": "10,000",
        "energy": "0.500 kWh, 50% of the time measured",
        "cost": "1.25 EUR",
    }
    assert dict(found["hashes"]) == {
        "model (files)": "aa",
        "model (weights)": "bb",
        "training data": "cc",
        "trained weights": "dd",
    }
    assert found["commands"] == [
        f"launch cluster up --config run.yaml --output {tmp_path}/state/output-{RUN_ID}-again"
    ]
    assert "class_names" in found["settings"]
    assert found["missing"] == [
        "use, power and temperature of the devices: they are shown live only"
    ]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    (recorded.output / "metrics.jsonl").unlink()
    (recorded.output / "status.json").unlink()
    lacks = report_of(RUN_ID)["missing"]
    assert [line.split(":")[0] for line in lacks] == [
        "steps",
        "settings, and the commands that repeat the run",
        "a validation",
        "proofs that the weights agree",
        "hashes of model, data and weights",
        "energy and cost",
        "use, power and temperature of the devices",
    ]


def test_a_distillation_has_a_report(tmp_path: Path) -> None:
    RecordedDistillation(tmp_path / "state")
    registry = Registry.for_this_user()
    made = make_report(registry, registry.get_run(TAUGHT_ID))
    assert made.state["distillation"]["shards"] == 4
    assert dict(made.state["report"]["results"])["loss of the last step"] == "1.6667"


def written(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run(["report", RUN_ID, *flags]) == 0, capsys.readouterr().err
    return Path(capsys.readouterr().out.strip()).read_text()


def test_the_page_has_its_data_inside_and_no_mark_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = RecordedRun(tmp_path / "state")
    recorded.finish(tmp_path / "state")
    recorded.metrics.record_event("alarm", 10, reason="</script><!--<script>\u2028")
    page = written(capsys)
    assert (tmp_path / f"{RUN_ID}.html").exists()
    inside = re.search(r'<script type="application/json" id="data">([^<]*)</script>', page)
    assert inside
    tree = json.loads(inside[1])
    assert tree["home"] == f"#/run/{RUN_ID}"
    state = tree[f"api/runs/{RUN_ID}"]
    assert state["records"][-1]["reason"] == "</script><!--<script>\u2028"
    assert [record["step"] for record in state["records"] if record["kind"] == "step"] == [
        *range(1, 11)
    ]
    assert re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*\"", page) == []
    assert "default-src 'none'" in page


def test_markdown_is_a_text_and_hosts_add_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = RecordedRun(tmp_path / "state")
    recorded.finish(tmp_path / "state", name="| @all [x](y) ``` http://a.b www.a.b\x1b[2J")
    text = written(capsys, "--format", "md")
    assert "| cost | 1.25 EUR |" in text
    assert (
        "| 4 | worker 1 was lost: connection of &#60;img src=x onerror=window.hacked=1&#62; |"
        in text
    )
    assert r"| model | \| &#64;all \[x\](y) \`\`\` http&#58;//a.b www&#46;a.b\\x1b\[2J |" in text
    assert "````yaml" in text
    assert "\x1b" not in text
    assert "| safe | 2 | 4 |" in text
    assert "<img" not in text.partition("```")[0]
    hostile = "&#60;img src=x onerror=window.hacked=1&#62;"
    said = f"step 0: as at step 0 {hostile} | step 10: as at step 10 {hostile}"
    assert f"| first answer | last answer |\n| --- | --- | --- |\n| How are you? | {said} |" in text


def test_the_card_is_the_trainers_with_the_report_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = RecordedRun(tmp_path / "state")
    assert run(["report", RUN_ID, "--format", "card"]) == 2
    assert "no folder to publish" in capsys.readouterr().err
    recorded.finish(tmp_path / "state")
    text = written(capsys, "--format", "card", "-o", "README.md")
    assert text.startswith("---\nlibrary_name: peft\n---\n")
    assert "## How it was trained\n\n|" in text


def test_the_ending_of_the_file_decides_on_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RecordedRun(tmp_path / "state")
    assert written(capsys, "-o", "a.html").startswith("<!doctype html>")
    assert written(capsys, "-o", "a.MD").startswith("# ")
    for flags, problem in (
        (("-o", "a.txt"), "a.txt: no report has the suffix .txt; use .html, .md"),
        (("-o", "a.csv"), "a.csv: no report has the suffix .csv; use .html, .md"),
        (("-o", "b.md", "--format", "html"), "b.md: --format html ends in .html, not in .md"),
    ):
        assert run(["report", *flags]) == 2
        assert problem in capsys.readouterr().err
        assert not Path(flags[1]).exists()


def test_a_file_is_replaced_only_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RecordedRun(tmp_path / "state")
    Path("mine").write_text("x")
    assert run(["report", "-o", "mine"]) == 2
    assert "mine exists already" in capsys.readouterr().err
    assert Path("mine").read_text() == "x"
    assert run(["report", "-o", "mine", "--force"]) == 0
    assert run(["report", "-o", "no/where"]) == 2
    assert "no/where: cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_that_no_launcher_started_is_reported_from_its_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    labels = [json.dumps({"text": f"{word} {n}", "label": word}) for n in range(8) for word in "ab"]
    Path("labels.jsonl").write_text("\n".join(labels))
    tiny = ("--hidden-size", "32", "--layers", "1")
    trained = [
        ["init-model", "-o", "model", "--data", "labels.jsonl", *tiny],
        ["finetune", "model", "--data", "labels.jsonl", "-o", "out", "--max-steps", "2"],
    ]
    for words in trained:
        subprocess.run([sys.executable, "-m", "trainer.cli", *words], check=True)
    assert run(["report", "out", "-o", "out.html"]) == 0
    view = read_output(Path("out"))
    found = make_report(Registry.for_this_user(), view.run, view).state["report"]
    assert dict(found["results"])["state"] == "completed"
    assert dict(found["facts"])["steps"] == "2 of 2"
    assert found["commands"] == [f"trainer finetune --config run.yaml -o {tmp_path}/out-again"]
    assert not [line for line in found["missing"] if "agree" in line], "of one process"
    status = json.loads(Path("out/status.json").read_text())
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, state in ((gone.pid, "failed"), (os.getpid(), "running")):
        Path("out/status.json").write_text(json.dumps({**status, "state": "running", "pid": pid}))
        assert read_output(Path("out")).state == state
    Path("out/status.json").write_text("{")
    capsys.readouterr()
    assert run(["report", "out", "-o", "again.html"]) == 2
    assert "status.json: not a report of a run" in capsys.readouterr().err
