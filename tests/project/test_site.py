"""The documentation as a site, opened from the disk by a browser without a network."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.rig.browser import Browser
from tests import ROOT

SITE = ROOT / "build" / "site"
LOADED = re.compile(
    r"<(?:script|img|source|link)\b[^>]*?(?:src|href|srcset)=\"?(https?://[^\" >]+)"
)


def test_what_is_not_ours_is_what_was_published() -> None:
    shim = (ROOT / "scripts" / "site" / "iframe-worker.js").read_bytes()
    digest = "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609"
    assert hashlib.sha256(shim).hexdigest() == digest


def test_every_page_has_its_place() -> None:
    tree = tomllib.loads((ROOT / "scripts" / "site" / "zensical.toml").read_text())
    placed = set(re.findall(r"'([^']+\.md)'", str(tree["project"]["nav"])))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= placed
    assert {page for page in placed if not (ROOT / page).exists()} == set()


@pytest.mark.long
@pytest.mark.needs("chromium")
def test_the_site_loads_nothing_from_elsewhere_and_is_searched(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "site" / "build.py"], check=True)
    pages = {path: path.read_text() for path in SITE.rglob("*.html")}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {path.stem for path in pages}
    assert not {name: found for name, text in pages.items() if (found := LOADED.findall(text))}
    browser = Browser(tmp_path / "chromium")
    try:
        browser.open((SITE / "docs" / "planning.html").as_uri())
        browser.wait("document.readyState === 'complete' && document.images.length > 1")
        assert browser.run("[...document.images].every((image) => image.naturalWidth > 0)")
        browser.run("document.querySelector('.md-search__button').click()")
        browser.wait("!!document.activeElement.shadowRoot")
        browser.call("Input.insertText", text="root_squash")
        found = "[...document.activeElement.shadowRoot.querySelectorAll('a')].map((a) => a.href)"
        browser.wait(f"{found}.includes('{(SITE / 'docs' / 'share.html').as_uri()}#the-server')")
        assert not browser.errors
    finally:
        browser.close()
