"""The page in a real browser: what it shows, what it survives, and what it does not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.launcher.views.dashboard.browser import Browser
from tests.launcher.views.dashboard.pictures import LOOKS, take_pictures
from tests.launcher.views.dashboard.recorded_run import HOSTILE, RUN_ID, RecordedRun
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
    assert shown["Weights agree"] == "3 workers1 proofs, last at step 10: 5f5f5f5f5f5f"
    assert shown["Faults survived"] == "11 came back, 4 samples dealt again"
    lanes = "[...document.querySelectorAll('.lane .track')].map((lane) => lane.ariaLabel)"
    assert browser.run(lanes)[:2] == [
        "worker 0: active from step 0 to 10",
        "worker 1: active from step 0 to 4, lost from step 4 to 6, active from step 6 to 10",
    ]
    assert browser.errors == []


def test_a_step_is_chosen_by_keyboard_and_by_its_event(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelectorAll('canvas').length === 5")
    browser.run("document.querySelector('#step').focus()")
    for _ in range(5):
        for kind in ("keyDown", "keyUp"):
            browser.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="ArrowLeft",
                code="ArrowLeft",
                windowsVirtualKeyCode=37,
            )
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
    browser.wait("document.querySelector('#link').textContent === 'reconnecting'")
    recorded.step(12)
    with serving(tmp_path / "state", "--port", str(urlsplit(server.url).port)):
        browser.wait(f"{at}.startsWith('12 ')")
        browser.wait("document.querySelector('#link').textContent === 'live'")
        sent = "performance.getEntriesByType('resource').filter((e) => e.name.includes('/api/'))"
        read = browser.run(f"{sent}.map((e) => new URL(e.name).pathname)")
        assert read.count(f"/api/runs/{RUN_ID}") == 1  # the whole history travelled once


def test_what_is_drawn_again_keeps_the_focus(
    recorded: RecordedRun, server: Server, browser: Browser
) -> None:
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelector('.events .good button') !== null")
    browser.run("document.querySelector('.events .good button').focus()")
    recorded.metrics.event("idle", 10, rank=2)
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


def test_axe_finds_nothing_and_pictures_are_taken(
    server: Server, browser: Browser, tmp_path: Path
) -> None:
    try:
        axe = (AXE.folder() / "package" / "axe.min.js").read_text()
    except PackageUnavailableError as error:
        pytest.skip(str(error))
    found: list[str] = []

    def examine(name: str) -> None:
        browser.run(f"{axe};0")
        faults = (
            "axe.run().then(({violations}) => violations.map(({id, help}) => id + ': ' + help))"
        )
        found.extend(f"{name}: {fault}" for fault in browser.run(faults))
        width = browser.run("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, f"{name} is {width} pixels too wide"

    made = take_pictures(browser, server.url, RUN_ID, tmp_path, examine)
    assert found == []
    assert browser.errors == []
    assert len(made) == 2 * len(LOOKS)
    for picture in made:
        assert re.match(rb"\x89PNG", picture.read_bytes())
