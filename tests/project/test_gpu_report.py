"""`scripts/gpu_report.sh`: lines with limits, recorded one by one, and done once."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from tests.waiting import PATIENCE, wait_for

APART = ["unshare", "--map-root-user", "--net"]
"""A network namespace without any interface that is up."""


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    before = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("gpu_report")
    signal.signal(signal.SIGTERM, before)


def python(code: str) -> str:
    return f"{sys.executable} -c {shlex.quote(code)}"


def line(report: ModuleType, name: str, command: str, **settings: object) -> Any:
    values = {"part": "check", "limit": 60, "rehearsal": command, **settings}
    return report.Line(name=name, command=command, **values)


def rows(out: Path) -> dict[str, list[str]]:
    """Return the cells of the summary by the lines' names."""
    text = (out / "summary.md").read_text()
    table = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    return {row[1]: row[2:] for row in table[1:]}


def ended(number: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_each_end_is_recorded_and_the_part_goes_on(
    report: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid); p.wait()"
    lines = [
        line(report, "fails", python("print('reason'); raise SystemExit(3)")),
        line(
            report,
            "late",
            python(f"import sys; sys.stdout.reconfigure(line_buffering=True); {child}"),
            limit=1,
        ),
        line(report, "skips", python("print('skipped: no card')")),
        line(
            report,
            "passes",
            python("print('noise'); print('speed: 1.250 of PEFT (at least 1: met)')"),
        ),
        line(report, "other", python("raise SystemExit(9)"), part="speed"),
    ]
    assert report.main(["check", "--out", str(tmp_path)], lines) == 1
    codes = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["code"]
        for name in ("fails", "late", "skips", "passes")
    }
    assert codes == {"fails": 3, "late": None, "skips": 0, "passes": 0}
    found = rows(tmp_path)
    assert [found[each.name][0] for each in lines] == [
        "exit code 3",
        "exceeded its limit",
        "skipped",
        "passed",
        "not run",
    ]
    assert found["passes"][-1] == "speed: 1.250 of PEFT (at least 1: met)"
    assert found["fails"][-1] == "reason"
    assert "torch: " in (tmp_path / "summary.md").read_text()
    number = int((tmp_path / "late.log").read_text().split()[0])
    assert ended(number)
    assert not list(tmp_path.glob(".*"))
    assert "fails: exit code 3" in capfd.readouterr().out


def test_a_part_does_again_what_has_not_passed(report: ModuleType, tmp_path: Path) -> None:
    count = "import pathlib, sys; f = open({0!r}, 'a'); f.write('x'); f.close(); "
    counts = {name: tmp_path / f"{name}-count" for name in ("good", "mended")}
    mark = tmp_path / "mark"
    good = line(report, "good", python(count.format(str(counts["good"]))))
    mended = line(
        report,
        "mended",
        python(
            count.format(str(counts["mended"]))
            + f"sys.exit(not pathlib.Path({str(mark)!r}).exists())"
        ),
    )
    out = tmp_path / "out"
    assert report.main(["check", "--out", str(out)], [good, mended]) == 1
    mark.touch()
    (out / "mended").mkdir()
    (out / "mended" / "left").touch()  # what it left half done
    assert report.main(["check", "--out", str(out)], [good, mended]) == 0
    assert report.main(["check", "--out", str(out)], [good, mended]) == 0
    assert [counts[name].read_text() for name in ("good", "mended")] == ["x", "xx"]
    assert not (out / "mended").exists()
    changed = line(report, "good", good.command + " again")  # another command has not passed
    assert report.main(["check", "--out", str(out)], [changed, mended]) == 0
    assert counts["good"].read_text() == "xx"


def test_lines_get_their_places_and_a_rehearsal_names_what_it_leaves_out(
    report: ModuleType, tmp_path: Path
) -> None:
    show = "import os, sys; print(sys.argv[1:], os.environ['BENCHMARK_RESULTS'])"
    lines = [
        line(report, "places", f"{python(show)} {{out}}/x {{models}} {{gpu}}"),
        line(report, "card", python("raise SystemExit(1)"), rehearsal=""),
        line(report, "driver", python("raise SystemExit(1)"), vulkan=True),
        line(report, "model", f"{python(show)} {{model}}"),
    ]
    words = ["check", "--rehearse", "--gpu", "of no such name", "--out", str(tmp_path)]
    assert report.main(words, lines) == 0
    found = rows(tmp_path)
    places = [f"{tmp_path}/x", f"{tmp_path}/models", "of no such name"]
    assert found["places"][-1] == f"{places} {tmp_path}/figures"
    assert found["card"][0] == "not rehearsed: needs a card"
    assert found["driver"][0].startswith("not rehearsed: no Vulkan device: ")
    assert found["model"][0] == "not run: no model folder"
    folder = tmp_path / "published"
    folder.mkdir()
    with pytest.raises(SystemExit) as refused:
        report.main([*words, "--model", str(folder)], lines)
    assert refused.value.code == 2
    (folder / "config.json").write_text("{}")
    assert report.main([*words, "--model", str(folder)], lines) == 0
    assert rows(tmp_path)["model"][-1] == f"{[str(folder)]} {tmp_path}/figures"


def test_a_line_runs_the_tests_it_names_wherever_it_is_started(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among other tests, and where some have passed elsewhere, as in continuous integration."""
    test = "tests/project/test_gpu_report.py::test_parts_fit_their_time_and_programs_exist"
    passed = tmp_path / "passed"
    passed.write_text(f"{test}\n")
    inherited = {
        "CI": "true",
        "MOTLEY_PASSED": str(passed),
        "MOTLEY_NOTE_PASSED": str(tmp_path / "noted"),
        "MOTLEY_TEST_JITTER": "7",
        "PYTEST_ADDOPTS": "-k 'of no such name'",
    }
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    pytests = f"{sys.executable} -P -m pytest -q -p no:cacheprovider {test}"
    shown = python(f"import os; print(sorted(set(os.environ) & set({list(inherited)!r})))")
    lines = [line(report, "tests", pytests), line(report, "variables", shown)]
    assert report.main(["check", "--out", str(tmp_path / "out")], lines) == 0
    found = rows(tmp_path / "out")
    assert found["tests"][-1].startswith("1 passed in ")
    assert found["variables"][-1] == "[]"
    assert not (tmp_path / "noted").exists()


def test_who_ends_the_report_ends_its_line(tmp_path: Path) -> None:
    code = (
        "import sys; import gpu_report as r; "
        "line = r.Line('check', 'long', 60, 'sleep 600', ''); "
        f"sys.exit(r.main(['check', '--out', {str(tmp_path)!r}], [line]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        sleeping = wait_for(
            lambda: [
                number
                for number in children.read_text().split()
                if Path(f"/proc/{number}/cmdline").read_bytes() == b"sleep\x00600\x00"
            ],
            "the line",
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert ended(int(sleeping[0]))


def test_who_ends_the_report_at_a_lines_start_ends_that_too(tmp_path: Path) -> None:
    code = """if True:
        import os, signal, subprocess, sys
        import gpu_report as r
        class Ended(subprocess.Popen):
            def __init__(self, *given, **settings):
                super().__init__(*given, **settings)
                if given[0] == ["sleep", "600"]:
                    print(self.pid, flush=True)
                    os.kill(os.getpid(), signal.SIGTERM)
        subprocess.Popen = Ended
        line = r.Line("check", "long", 60, "sleep 600", "")
        sys.exit(r.main(["check", "--out", sys.argv[1]], [line]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert ended(int(done.stdout))


@pytest.mark.parametrize("words", [["chekc"], [], ["check", "--out", "/dev/null/x"]])
def test_what_cannot_start_is_one_line(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gpu_report.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "gpu_report.sh: " in done.stderr.splitlines()[-1]


def test_parts_fit_their_time_and_programs_exist(report: ModuleType) -> None:
    for part in report.PARTS:
        assert 0 < sum(each.limit for each in report.LINES if each.part == part) <= 480
    assert len({each.name for each in report.LINES}) == len(report.LINES)
    for each in report.LINES:
        for word in shlex.split(f"{each.command} {each.rehearsal}"):
            path = word.partition("::")[0]
            if path.startswith(("tests/", "benchmarks/", "scripts/")):
                assert (ROOT / path).exists(), f"{each.name}: {path}"


@pytest.mark.long
@pytest.mark.timeout(1500)  # a minute or two of one core, on a busy machine too
@pytest.mark.parametrize("part", ["check", "speed", "users", "vulkan"])
def test_a_part_is_rehearsed(report: ModuleType, tmp_path: Path, part: str) -> None:
    """`check` without a network, where namespaces are allowed; workers of others need loopback."""
    allowed = shutil.which("unshare") and not subprocess.call([*APART, "true"])
    apart = APART if part == "check" and allowed else []
    program = ["bash", str(ROOT / "scripts/gpu_report.sh"), "--rehearse", "--out", tmp_path, part]
    done = subprocess.run(
        [*apart, *program],
        cwd=tmp_path,
        env={**os.environ, "VENV": str(Path(sys.executable).parents[1])},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    found = rows(tmp_path)
    here = [each.name for each in report.LINES if each.part == part]
    for name in here:
        assert found[name][0].startswith(("passed", "not rehearsed: ", "not run: no model folder"))
    if part == "check":
        assert all(found[name][0] == "passed" for name in here)
        figures = {file.name for file in (tmp_path / "figures").iterdir()}
        assert figures == {"ceilings.json", "one_seed.json"}
