"""The browser of tests and measurements: it sees this machine and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rig.browser import Browser

pytestmark = [pytest.mark.cluster, pytest.mark.needs("chromium")]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    made = Browser(tmp_path / "chromium")
    yield made
    made.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "example.org"])
def test_it_reaches_no_other_host(browser: Browser, host: str) -> None:
    # Not by going there: a page that is not found lets it ask public name servers what is wrong.
    browser.run(f"fetch('http://{host}/').catch(() => 0)")
    while not browser.errors:  # they come by themselves
        browser.run("new Promise((done) => setTimeout(done, 50))")
    (error,) = browser.errors
    assert "net::ERR_NAME_NOT_RESOLVED" in error
