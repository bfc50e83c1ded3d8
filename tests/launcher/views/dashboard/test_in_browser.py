"""The page in a real browser: what it shows, what it survives, and what it does not run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.rig.browser import Browser
from launcher.cli import run
from tests.launcher.views.dashboard.pictures import LOOKS, take_pictures
from tests.launcher.views.dashboard.recorded_run import (
    BEGAN,
    HOSTILE,
    OTHER_ID,
    RUN_ID,
    TAUGHT_ID,
    RecordedDistillation,
    RecordedRun,
)
from tests.launcher.views.dashboard.serving import Server, serving
from tests.real.packages import Package, PackageUnavailableError

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.needs("chromium"),
    pytest.mark.usefixtures("own_state"),
]
AXE = Package(
    "npm", "axe-core", "4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
)
"""Deque's checks of accessibility; MPL-2.0."""


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "state")


@pytest.fixture
def server(recorded: RecordedRun, tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "state") as made:
        yield made


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    made = Browser(tmp_path / "chromium")
    yield made
    made.close()


def tiles(browser: Browser) -> dict[str, str]:
    """Return the figures at the top by their names."""
    return browser.run(
        "Object.fromEntries([...document.querySelectorAll('.tile')].map((tile) =>"
        " [tile.querySelector('dt').textContent, tile.querySelector('dd').textContent]))"
    )


def test_a_run_shows_what_the_server_tells(server: Server, browser: Browser) -> None:
    tree: dict[str, Any] = server.json(f"api/runs/{RUN_ID}")
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelectorAll('canvas').length === 5")
    training = tree["status"]["training"]
    shown = tiles(browser)
    assert shown["Loss"] == f"{training['loss']:.4f}"
    assert shown["Tokens/s"] == f"{training['tokens_per_second']:,.0f}"
    assert shown["Validation"] == "0.7500accuracy 0.500 · step 10"
    assert shown["Samples counted"] == "120each exactly once"
    assert shown["Weights agree"] == "3 workers1 proof, last at step 10: 5f5f5f5f5f5f"
    assert shown["Faults survived"] == "11 came back, 4 samples dealt again"
    lanes = "[...document.querySelectorAll('.lane .track')].map((lane) => lane.ariaLabel)"
    assert browser.run(lanes)[:2] == [
        "worker 0: active from step 0 to 10",
        "worker 1: active from step 0 to 4, lost from step 4 to 6, active from step 6 to 10",
    ]
    assert browser.errors == []


def test_answers_to_the_prompts_newest_and_first(
    recorded: RecordedRun, server: Server, browser: Browser
) -> None:
    browser.open(f"{server.url}#/run/{RUN_ID}")
    shown = "section[aria-labelledby=answers] > div >"
    browser.wait(f"document.querySelectorAll('{shown} ul').length === 2")
    assert text(browser, f"{shown} h3") == ["How are you?", HOSTILE]
    at = [f"as at step {step} {HOSTILE}" for step in (0, 4, 10, 11)]
    assert text(browser, f"{shown} ul span") == [at[2], at[0]] * 2
    assert text(browser, f"{shown} ul button") == ["step 10", "step 0"] * 2
    browser.run(f"document.querySelector('{shown} details').open = true")
    recorded.answer(11)
    between = f"{shown} details[open] span"
    browser.wait(f"document.querySelectorAll('{between}').length === 2")
    assert text(browser, between) == [at[2], at[1]]
    assert browser.errors == []


def test_a_run_that_has_ended_unfolds_its_result_and_is_not_live(
    recorded: RecordedRun, server: Server, browser: Browser, tmp_path: Path
) -> None:
    recorded.metrics.record_answer(
        10, number=1, prompt="How are you?", text=" ", tokens=1, ended=True
    )
    card = [f"line {number} of the result: {'runs/output/' * 4}" for number in range(20)]
    recorded.status["summary"] = card
    recorded.finish(tmp_path / "state")
    browser.open(f"{server.url}#/run/{RUN_ID}")
    result = "document.querySelector('details:has(> summary + pre)')"
    browser.wait(f"{result}?.open && document.querySelector('#link').textContent === 'up to date'")
    assert browser.run(f"{result}.querySelector('pre').textContent.trim().split('\\n')") == card
    assert "(an empty answer)" in text(browser, "section[aria-labelledby=answers] ul span")
    assert browser.run("document.querySelectorAll('.proofs small wbr').length") > 1
    browser.run(f"{result}.open = false")
    recorded.step(11)
    browser.wait("document.querySelector('output').textContent.startsWith('11 ')")
    assert browser.run(f"{result}.open") is False, "what is drawn again stays as it was"
    assert browser.errors == []


def test_a_step_is_chosen_by_keyboard_and_by_its_event(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelectorAll('canvas').length === 5")
    browser.run("document.querySelector('#step').focus()")
    for _ in range(5):
        press(browser, "ArrowLeft", 37)
    title = "document.querySelector('#waterfall').textContent"
    assert browser.run(title) == "One step: 5"
    assert "loss 0.4000" in browser.run("document.querySelector('#step').ariaValueText")
    rows = "[...document.querySelectorAll('.lane:has(.piece) > .right')].map((e) => e.textContent)"
    assert browser.run(rows) == ["6 samples, 300 ms", "6 samples, 400 ms"]  # 1 was lost
    browser.run("document.querySelector('.events .bad button').click()")
    assert browser.run(title) == "One step: 4"
    assert browser.errors == []


def test_new_points_arrive_and_a_server_that_is_gone_does_no_harm(
    recorded: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    at = "document.querySelector('output')?.textContent"
    with serving(tmp_path / "state") as server:
        browser.open(f"{server.url}#/run/{RUN_ID}")
        browser.wait(f"{at}?.startsWith('10 ')")
        recorded.step(11)
        browser.wait(f"{at}.startsWith('11 ')")
        with browser.asleep():
            recorded.step(12)
        browser.wait(f"{at}.startsWith('12 ')")
    browser.wait("document.querySelector('#link').textContent === 'reconnecting'")
    recorded.step(13)
    with serving(tmp_path / "state", "--port", str(urlsplit(server.url).port)):
        browser.wait(f"{at}.startsWith('13 ')")
        browser.wait("document.querySelector('#link').textContent === 'up to date'")
        sent = "performance.getEntriesByType('resource').filter((e) => e.name.includes('/api/'))"
        read = browser.run(f"{sent}.map((e) => new URL(e.name).pathname)")
        assert read.count(f"/api/runs/{RUN_ID}") == 1  # the whole history travelled once


def test_what_is_drawn_again_keeps_the_focus(
    recorded: RecordedRun, server: Server, browser: Browser
) -> None:
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelector('.events .good button') !== null")
    browser.run("document.querySelector('.events .good button').focus()")
    recorded.metrics.record_event("idle", 10, rank=2)
    browser.wait("document.querySelector('.events .amber') !== null")
    assert browser.run("document.activeElement.textContent") == "step 6"
    assert browser.run("document.querySelector('#said').textContent").startswith("worker 2 idle")
    assert browser.errors == []


@pytest.mark.parametrize("page", ["", f"#/run/{RUN_ID}"])
def test_what_a_host_says_is_data(server: Server, browser: Browser, page: str) -> None:
    browser.open(f"{server.url}{page}")
    browser.wait("document.querySelector('main h1') !== null")
    if page:
        browser.wait(f"document.body.innerText.includes({HOSTILE!r})")
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('img:not([src=\"icon.svg\"])').length") == 0
    assert browser.errors == []


def test_a_page_that_was_left_draws_nothing_over_the_next(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    other = RecordedRun(tmp_path / "state", OTHER_ID)
    browser.open(server.url)
    browser.wait(f"document.getElementById('choose-{OTHER_ID}') !== null")
    browser.run("window.frames_due = []; window.frame = window.requestAnimationFrame")
    browser.run("window.requestAnimationFrame = (draw) => frames_due.push(draw)")
    other.step(11)
    browser.wait("frames_due.length > 0")
    browser.run(f"window.requestAnimationFrame = frame; location.hash = '#/run/{RUN_ID}'")
    browser.wait("document.querySelector('#link').textContent === 'live'")
    browser.wait("document.querySelectorAll('canvas').length > 0")
    browser.run("frames_due.forEach((draw) => draw())")
    assert browser.run("document.querySelectorAll('canvas').length") > 0
    assert browser.errors == []


def text(browser: Browser, selector: str) -> list[str]:
    """Return the texts of elements."""
    return browser.run(
        f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)"
    )


def test_two_runs_are_chosen_and_laid_over_each_other(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    other = RecordedRun(tmp_path / "state", OTHER_ID)
    other.step(11)
    browser.open(server.url)
    browser.wait(f"document.getElementById('choose-{OTHER_ID}')?.checked === false")
    for run_id in (RUN_ID, OTHER_ID):
        browser.run(f"document.getElementById('choose-{run_id}').click()")
    browser.run("document.querySelector('a[href^=\"#/runs/\"]').click()")
    browser.wait("document.querySelectorAll('canvas').length === 2")
    key = "document.querySelector('.chart .legend').textContent"
    assert f"{OTHER_ID} " in browser.run(key)
    ends = {run_id: server.json(f"api/runs/{run_id}")["records"] for run_id in (RUN_ID, OTHER_ID)}
    for run_id, row in zip((RUN_ID, OTHER_ID), text(browser, "tbody tr"), strict=True):
        step = [record for record in ends[run_id] if record["kind"] == "step"][-1]
        counted, _, _, tokens, _ = step["totals"]
        assert row.startswith(run_id)
        assert f"{step['step']}" in row
        assert f"0.7500{counted:,}{tokens:,}" in row
    for axis in ("tokens", "time"):
        browser.run(f"document.querySelector('[value={axis}]').click()")
        drawn = browser.run("document.querySelector('.plot').ariaLabel")
        assert drawn.startswith("Loss, smoothed: 2.0000 at first")
    other.step(12)
    browser.wait("document.querySelector('tbody tr:nth-child(2)').textContent.includes('144')")
    assert browser.errors == []


def test_a_log_follows_and_begins_at_the_second_of_the_chosen_step(
    recorded: RecordedRun, server: Server, browser: Browser
) -> None:
    first = f"2026-11-18T11:06:40Z {HOSTILE}\n"  # BEGAN
    recorded.log("worker-2", first, 1, (BEGAN + 1, len(first)))
    later = "2026-11-18T11:06:43Z it is lost\n2026-11-18T11:06:50Z it is back\n"
    recorded.log("worker-2", later, 1, (BEGAN + 12, len(first + later)))
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelector('.events .bad button') !== null")
    browser.run("document.querySelector('#process').value = 'worker-2'")
    browser.run("document.querySelector('details:has(.lines)').open = true")
    browser.wait("document.querySelectorAll('.lines span').length === 3")
    recorded.log("worker-2", "2026-11-18T11:06:51Z new\n")
    browser.wait("document.querySelectorAll('.lines span').length === 4")
    # Step 6 was at BEGAN + 3 s.
    browser.run("document.querySelector('.events .good button').click()")
    browser.run("document.querySelector('#since').click()")
    browser.wait("document.querySelectorAll('.lines span').length === 3")
    assert text(browser, ".lines span")[0] == "2026-11-18T11:06:43Z it is lost"
    assert text(browser, ".lines .now") == ["2026-11-18T11:06:43Z it is lost"]
    browser.run("document.querySelector('#since').click()")
    browser.wait("document.querySelectorAll('.lines span').length === 4")
    browser.run("document.querySelector('#words').value = 'ONERROR'")
    browser.run("document.querySelector('#words').oninput()")
    browser.wait("document.querySelectorAll('.lines span').length === 1")
    assert text(browser, ".lines") == [first.strip()]
    assert browser.run("window.hacked") is None
    assert browser.errors == []


def press(browser: Browser, key: str, code: int) -> None:
    """Press a key and let go of it."""
    typed = {"text": "\r"} if key == "Enter" else {}
    for kind, more in (("keyDown", typed), ("keyUp", {})):
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        browser.call("Input.dispatchKeyEvent", type=kind, **names, **more)


def test_the_time_of_a_line_leads_to_its_second_in_the_curves(
    recorded: RecordedRun, server: Server, browser: Browser
) -> None:
    lines = (
        "2026-11-18T11:06:42Z a\n",
        "no time\n",
        "2026-11-18T11:06:44Z b\n",
        f"2026-11-18T11:06:45Z {HOSTILE}\n",
    )
    recorded.log("worker-2", "".join(lines), 1, (BEGAN + 6, len("".join(lines))))
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelectorAll('canvas').length === 5")
    browser.run("document.querySelector('#process').value = 'worker-2'")
    browser.run("document.querySelector('details:has(.lines)').open = true")
    browser.wait("document.querySelectorAll('.lines span').length === 4")
    assert text(browser, ".lines button") == [
        "2026-11-18T11:06:42Z",
        "2026-11-18T11:06:44Z",
        "2026-11-18T11:06:45Z",
    ]
    assert text(browser, ".lines .now") == [], "the newest step was not chosen"
    at = "document.querySelector('output').textContent"
    browser.run("document.querySelector('.lines').focus()")
    for key, code in (("ArrowUp", 38), ("ArrowUp", 38), ("Enter", 13)):
        press(browser, key, code)
    assert browser.run(at).startswith("8 ")  # at BEGAN + 4 s
    assert text(browser, ".lines .now") == ["2026-11-18T11:06:44Z b"]
    values = "document.querySelector('.chart .legend').textContent"
    assert "training 0.2500" in browser.run(values)
    recorded.step(11)
    browser.wait("document.querySelector('#step').max === '10'")
    recorded.log("worker-2", "2026-11-18T11:06:46Z new\n")
    browser.wait("document.querySelectorAll('.lines span').length === 5")
    assert browser.run("document.activeElement.textContent") == "2026-11-18T11:06:44Z"
    press(browser, "ArrowUp", 38)
    press(browser, "Enter", 13)
    assert browser.run(at).startswith("4 ")
    assert text(browser, ".lines .now") == ["2026-11-18T11:06:42Z a"]
    assert browser.errors == []


def test_a_distillation_shows_its_shards_and_the_best_checkpoint(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    RecordedDistillation(tmp_path / "state")
    browser.open(f"{server.url}#/run/{TAUGHT_ID}")
    browser.wait("document.querySelectorAll('canvas').length === 4")
    lanes = "[...document.querySelectorAll('.lane .track')].map((lane) => lane.ariaLabel)"
    assert browser.run(lanes) == ["written: 3 of 4 shards, 1 damaged", "read: 1 of 4"]
    assert text(browser, "#shards ~ div tbody tr") == [
        f"step 3–2.5000{HOSTILE}",
        "step 2best2.0000–",
    ]
    browser.run("document.querySelector('#shards ~ div tbody tr:last-child button').click()")
    assert browser.run("document.querySelector('output').textContent").startswith("2 ")
    legends = text(browser, ".chart .legend")
    assert "from the teacher (KL) 0.5000with the text (CE) 2.0000" in legends
    assert browser.errors == []


def test_the_map_shows_links_and_a_lost_host_and_runs_no_name(
    server: Server, browser: Browser
) -> None:
    hosts = [
        {"name": "a", "rates": {"b": 9.4e8, HOSTILE: 2.5e9}, "reachable": True},
        {"name": "b", "rates": {"a": 9.5e8, "gone": 1e9}, "reachable": True},
        {"name": HOSTILE, "rates": {}, "reachable": False},
    ]
    busy = [["run-1/coordinator"], ["run-1/worker-0"], []]
    told = json.dumps([{**host, "busy": its} for host, its in zip(hosts, busy, strict=True)])
    browser.open(server.url)
    browser.wait("document.querySelector('main h1') !== null")
    browser.run(f"import('./map.js').then(({{ map }}) => document.body.append(map({told})))")
    assert text(browser, ".map tbody tr") == [
        "a – bin use by a run940 Mbit/s950 Mbit/s",
        f"{HOSTILE} – aunreachable–2.5 Gbit/s",
    ]
    assert text(browser, "text.rate") == ["940 Mbit/s"]  # of the link in use
    assert browser.run("document.querySelectorAll('line').length") == 2
    assert browser.run("window.hacked") is None
    assert browser.errors == []


def test_a_report_is_the_page_without_a_server(
    recorded: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    recorded.finish(tmp_path / "state")
    path = tmp_path / "report.html"
    assert run(["report", RUN_ID, "-o", str(path)]) == 0
    browser.open(path.as_uri())
    browser.wait("document.querySelectorAll('canvas').length === 5")
    assert browser.run("document.querySelector('#link').textContent") == "report"
    shown = tiles(browser)
    assert shown["Loss"] == "0.2000"
    assert shown["Faults survived"] == "11 came back, 4 samples dealt again"
    facts = "Object.fromEntries([...document.querySelectorAll('.facts dt')].map((each) =>"
    found = browser.run(f"{facts} [each.textContent, each.nextSibling.textContent]))")
    assert found["model"] == HOSTILE
    assert found["trained weights"] == "dd"
    assert f"{HOSTILE}31" in text(browser, "tbody tr")  # of the confusion matrix
    # A step is chosen as on the page of a server, and a hash of another run leads nowhere.
    browser.run("document.querySelector('.events .bad button').click()")
    assert browser.run("document.querySelector('#waterfall').textContent") == "One step: 4"
    asked = "performance.getEntriesByType('resource').filter((e) => !e.name.startsWith('data:'))"
    assert browser.run(f"{asked}.map((each) => each.name)") == []
    assert browser.run("window.hacked") is None
    assert browser.errors == []


def test_axe_finds_nothing_and_pictures_are_taken(
    server: Server, recorded: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    RecordedRun(tmp_path / "state", OTHER_ID)
    RecordedDistillation(tmp_path / "state")
    recorded.log("coordinator", f"2026-11-18T11:06:40Z {HOSTILE}\n")
    try:
        axe = (AXE.folder() / "package" / "axe.min.js").read_text()
    except PackageUnavailableError as error:
        pytest.skip(str(error))
    found: list[str] = []

    pages = {
        "cluster": "",
        "run": f"run/{RUN_ID}",
        "runs": f"runs/{RUN_ID}/{OTHER_ID}",
        "distillation": f"run/{TAUGHT_ID}",
        "answers": f"run/{RUN_ID}",
    }

    def examine(name: str) -> None:
        browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
        browser.run(f"{axe};0")
        faults = (
            "axe.run().then(({violations}) => violations.map(({id, help}) => id + ': ' + help))"
        )
        found.extend(f"{name}: {fault}" for fault in browser.run(faults))
        width = browser.run("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, f"{name} is {width} pixels too wide"

    made = take_pictures(browser, server.url, pages, tmp_path, examine)
    recorded.finish(tmp_path / "state")
    report = tmp_path / "report.html"
    assert run(["report", RUN_ID, "-o", str(report)]) == 0
    own = {"report": f"run/{RUN_ID}"}
    made += take_pictures(browser, report.as_uri(), own, tmp_path, examine)
    assert found == []
    assert browser.errors == []
    assert len(made) == (len(pages) + len(own)) * len(LOOKS)
    for picture in made:
        assert re.match(rb"\x89PNG", picture.read_bytes())
