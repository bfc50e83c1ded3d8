"""Pictures of the page, for the documentation; from a dashboard that runs:

python -m tests.launcher.views.dashboard.pictures http://127.0.0.1:8642/ RUN docs
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.launcher.views.dashboard.browser import Browser

LOOKS = ((1280, False), (1280, True), (380, False), (380, True))
"""Widths in pixels, and whether the colours are dark."""
_HEIGHTS = {1280: 1525, 380: 1500}
"""Pixels from the top that a picture shows."""


def take_pictures(
    browser: Browser,
    url: str,
    run_id: str,
    folder: Path,
    examine: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Take the overview and a run in every look; `examine` is called with each picture's name."""
    made: list[Path] = []
    for name, page, ready in (
        ("cluster", "#/", "document.querySelector('.meter') !== null"),
        ("run", f"#/run/{run_id}", "document.querySelectorAll('canvas').length === 5"),
    ):
        for width, dark in LOOKS:
            browser.looks(width, dark=dark)
            browser.open(url + page)
            browser.wait(f"{ready} && document.querySelector('#link').textContent === 'live'")
            browser.run("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
            picture = folder / f"dashboard-{name}-{width}-{'dark' if dark else 'light'}.png"
            browser.picture(picture, _HEIGHTS[width])
            made.append(picture)
            examine(picture.stem)
    return made


def main() -> None:
    """Take the pictures of a dashboard that runs."""
    url, run_id, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        take_pictures(browser, url, run_id, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
