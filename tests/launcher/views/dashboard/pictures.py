"""Pictures of the page, for the documentation; from a dashboard that runs:

python -m tests.launcher.views.dashboard.pictures http://127.0.0.1:8642/ docs \
    cluster= run=run/RUN runs=runs/RUN/OTHER answers=run/RUN distillation=run/RUN
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.rig.browser import Browser

LOOKS = ((1280, False), (1280, True), (380, False), (380, True))
"""Widths in pixels, and whether the colours are dark."""
_HEIGHTS = {1280: 1525, 380: 1500}
"""Pixels from the top that a picture shows."""


_READY = {
    "cluster": "document.querySelector('.meter') !== null",
    "run": "document.querySelectorAll('canvas').length === 5",
    "runs": "document.querySelectorAll('canvas').length === 2",
    "report": "document.querySelectorAll('canvas').length === 5",
    "distillation": "document.querySelectorAll('canvas').length === 4",
    "answers": "document.querySelector('[aria-labelledby=answers] li') !== null",
}
"""By the name of a page, when it is drawn."""
_PARTS = {"answers": "section[aria-labelledby=answers]"}
"""By the name of a page, the part that is taken; else all from its top."""


def take_pictures(
    browser: Browser,
    url: str,
    pages: Mapping[str, str],
    folder: Path,
    examine: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Take pages in every look; `examine` is called with each picture's name.

    Args:
        pages: the part of the address behind `#/` by name, a key of `_READY`.
    """
    made: list[Path] = []
    for name, page in pages.items():
        for width, dark in LOOKS:
            browser.looks(width, dark=dark)
            browser.open(f"{url}#/{page}")
            link = "document.querySelector('#link').textContent"
            browser.wait(f"{_READY[name]} && ['live', 'up to date', 'report'].includes({link})")
            browser.run("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
            picture = folder / f"dashboard-{name}-{width}-{'dark' if dark else 'light'}.png"
            browser.picture(picture, _HEIGHTS[width], _PARTS.get(name, ""))
            made.append(picture)
            examine(picture.stem)
    return made


def main() -> None:
    """Take the pictures of a dashboard that runs."""
    url, folder, *named = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        pages = dict(each.split("=", 1) for each in named)
        take_pictures(browser, url, pages, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
