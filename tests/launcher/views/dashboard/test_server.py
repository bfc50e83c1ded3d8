"""What the dashboard's server answers, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from launcher.cli import run
from tests.launcher.views.dashboard.recorded_run import (
    BEGAN,
    HOSTILE,
    RUN_ID,
    TAUGHT_ID,
    RecordedDistillation,
    RecordedRun,
)
from tests.launcher.views.dashboard.serving import serving
from trainer.system.timestamp import format_timestamp

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("own_state")]


def test_a_run_is_what_status_shows_and_only_new_records_follow(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    with serving(tmp_path / "state") as server:
        overview = server.json("api/overview")
        assert [(r["run_id"], r["step"], r["loss"]) for r in overview["runs"]] == [
            (RUN_ID, 10, 0.2)
        ]
        assert [host["name"] for host in overview["hosts"]] == ["localhost"]
        status, headers, text = server.get("metrics")
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE_PLAIN_0_0_4)
        assert f'motley_run_loss{{run="{RUN_ID}"}} 0.2\n' in text
        tree = server.json(f"api/runs/{RUN_ID}")
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "status", "--run", RUN_ID, "--json"],
            env=os.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        status = json.loads(done.stdout)
        assert tree["status"] == {key: status[key] for key in tree["status"]}
        assert tree["status"]["reason"] == HOSTILE  # as data
        steps = [record for record in tree["records"] if record["kind"] == "step"]
        assert [step["loss"] for step in steps] == [2.0 / number for number in range(1, 11)]
        assert steps[3]["ledger"] == [36, 48, 0, 0]
        recorded.step(11)
        made, answer = server.request(
            f"api/runs/{RUN_ID}/events", last_event_id=str(tree["cursor"])
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        while answer.readline() != b"event: records\n":
            pass
        cursor = int(answer.readline().removeprefix(b"id: "))
        assert cursor > tree["cursor"]
        data = json.loads(answer.readline().removeprefix(b"data: "))
        assert [record["step"] for record in data] == [11]
        made.close()


def test_it_only_reads_and_answers_to_its_own_name_alone(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "state")
    before = files(tmp_path)
    with serving(tmp_path / "state") as server:
        status, headers, text = server.get("")
        assert status == 200
        assert text.startswith("<!doctype html>")
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "server" not in headers
        for path in ("", "api/overview", f"api/runs/{RUN_ID}"):
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                status, headers, _ = server.get(path, method)
                assert status == 405
                assert headers["content-security-policy"] == policy
        assert server.get("", host="evil.example")[0] == 400  # by DNS rebinding
        for path in (
            "api/runs/none",
            f"api/runs/{RUN_ID}/logs/worker-9",
            "api/runs/..%2F..%2Fetc",
            "..%2Fserver.py",
            "x",
        ):
            assert server.get(path)[0] == 404, path
    assert files(tmp_path) == before


def test_a_log_is_bounded_filtered_and_begins_at_a_moment(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    early = "".join(f"2026-11-18T11:00:00Z early {number}\n" for number in range(600))
    recorded.log("worker-0", early, 1, (BEGAN, len(early)))
    recorded.log(
        "worker-0", f"2026-11-18T11:00:02Z loss NaN \x1b[2J{HOSTILE} {'x' * 1000}\nhalf", 1
    )
    with serving(tmp_path / "state") as server:
        path = f"api/runs/{RUN_ID}/logs/worker-0"
        newest = server.json(path)
        assert len(newest["lines"]) == 500
        assert newest["lines"][0] == "2026-11-18T11:00:00Z early 102"
        assert newest["lines"][-2].startswith(
            f"2026-11-18T11:00:02Z loss NaN \\x1b[2J{HOSTILE} xxx"
        )
        assert len(newest["lines"][-2]) == 400
        assert newest["lines"][-1] == "half"  # the process is over
        assert newest["timestamps"] == [BEGAN - 400] * 498 + [BEGAN - 398, None]
        since = server.json(f"{path}?since={BEGAN + 1}")
        assert [line[:20] for line in since["lines"]] == ["2026-11-18T11:00:02Z", "half"]
        assert [line[21:25] for line in server.json(f"{path}?find=LOSS+nan")["lines"]] == ["loss"]
        assert server.json(f"{path}?find=(x%2B)%2B%24")["lines"] == []  # words, no pattern
        after = f"{path}?after={newest['attempt']}.{newest['end']}"
        assert server.json(after)["lines"] == []
        recorded.log("worker-0", "again\n", 2)
        assert server.json(after) == {
            "attempt": 2,
            "end": 6,
            "lines": ["again"],
            "timestamps": [None],
        }
        assert server.json(f"api/runs/{RUN_ID}/logs/coordinator")["lines"] == []


def test_lines_of_a_long_log_are_dated_and_begin_at_a_moment(tmp_path: Path) -> None:
    recorded = RecordedRun(tmp_path / "state")
    written = [BEGAN + 7 * number for number in range(10_000)]
    lines = [f"{format_timestamp(each)} x\n" for each in written]
    sizes = accumulate(map(len, lines))
    marks = [(each + 4.5, size) for each, size in zip(written, sizes, strict=True)]
    recorded.log("worker-1", "".join(lines), 1, *marks)
    with serving(tmp_path / "state") as server:
        path = f"api/runs/{RUN_ID}/logs/worker-1"
        assert server.json(path)["timestamps"] == written[-500:]
        assert server.json(f"{path}?since={written[50]}")["timestamps"] == written[50:550]


def test_a_distillation_is_told_as_its_folders_are(tmp_path: Path) -> None:
    RecordedDistillation(tmp_path / "state")
    with serving(tmp_path / "state") as server:
        assert server.json(f"api/runs/{TAUGHT_ID}")["distillation"] == {
            "shards": 4,
            "written": [[0, 1], [3, 3]],
            "damaged": [[2, 2]],
            "read": 1.5,
            "epoch": 0,
            "scores": [
                {"step": 2, "best": True, "figures": {"loss loss": 2.0}, "reason": None},
                {"step": 3, "best": False, "figures": {"loss loss": 2.5}, "reason": HOSTILE},
            ],
        }


def files(folder: Path) -> dict[Path, int]:
    """Return the files below a folder and when each was written."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_on_other_addresses_it_has_tls_and_a_token(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "state")
    with serving(tmp_path / "state", "--bind", "0.0.0.0", "--port", "0") as shown:
        assert shown.url.startswith("https://")
        at = shown.url.split("/")
        port, token = at[2].rpartition(":")[2], at[3]
        assert len(token) >= 22
        server = type(shown)(f"https://localhost:{port}/{token}/", shown.process, shown.context)
        assert server.get("")[0] == 200  # by the cluster's CA
        assert server.json("api/overview")["runs"]
        for path in (
            "/",
            "/metrics",
            "/api/overview",
            f"/{'y' if token[0] == 'x' else 'x'}{token[1:]}/api/overview",
            f"/{token[:-1]}/",
        ):
            assert server.get(path)[0] == 404, path


def test_runs_of_trainer_are_shown_by_their_output_folders(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "state")
    for name, state, pid in (("done", "completed", 1), ("going", "running", os.getpid())):
        folder = tmp_path / name
        folder.mkdir()
        status = {"schema": "motley.status/2", "run_id": "tags", "state": state, "pid": pid}
        status |= {"step": 1, "total_steps": 1, "expect_workers": 1, "updated": BEGAN}
        (folder / "status.json").write_text(json.dumps(status))
        step = {"kind": "step", "step": 1, "time": BEGAN, "loss": 2.0}
        (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    folders = [str(tmp_path / name) for name in ("done", "going")]
    with serving(tmp_path / "state", *folders, "--port", "0") as server:
        shown = {run["run_id"]: run for run in server.json("api/overview")["runs"]}
        states = {name: (run["state"], run["live"]) for name, run in shown.items()}
        del states[RUN_ID]
        assert states == {"tags": ("completed", False), "tags-2": ("running", True)}
        counts = [(shown[name]["workers"], shown[name]["joined"]) for name in states]
        assert counts == [(1, 1), (1, 1)]
        for name, folder in zip(("tags", "tags-2"), folders, strict=True):
            tree = server.json(f"api/runs/{name}")
            assert (tree["launched"], tree["status"]["output"]) == (False, folder)
            assert [record["loss"] for record in tree["records"]] == [2.0]
            assert tree["remarks"] == []
            assert server.json(f"api/runs/{name}/logs/coordinator")["lines"] == []
        (tmp_path / "done" / "status.json").unlink()
        assert server.json(f"api/runs/{RUN_ID}")["launched"]


def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["dashboard", "--port", port]) == 2
        assert "give another --bind or --port" in capsys.readouterr().err
    assert run(["dashboard", "--bind", "999.1.1.1", "--port", "0"]) == 2
    assert capsys.readouterr().err == (
        "launch: --bind 999.1.1.1: not an IP address, such as 127.0.0.1\n"
    )
    assert run(["dashboard", "--bind", "127.0.0.1:8642"]) == 2
    assert "--bind 127.0.0.1:8642: not an IP address, such" in capsys.readouterr().err
    assert run(["dashboard", str(tmp_path)]) == 2
    assert "has no status.json; give an output folder of `trainer`" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "launcher.views.dashboard.server", raising=False)
    assert run(["dashboard", "--port", "0"]) == 2
    assert capsys.readouterr().err == (
        "launch: the dashboard needs the package uvicorn; install the extra: "
        "pip install 'motley[dashboard]'\n"
    )
