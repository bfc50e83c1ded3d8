"""The files of the page: small, vendored unchanged, and nothing from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import re
import tomllib

from launcher.views.dashboard.server import PAGE
from tests import ROOT

FILES = {path.name: path.read_bytes() for path in PAGE.iterdir()}


def test_uplot_is_what_was_published() -> None:
    for line in FILES["uplot.sha256"].decode().splitlines():
        digest, name = line.split()
        assert hashlib.sha256(FILES[name]).hexdigest() == digest, name
    assert b"The MIT License" in FILES["uplot.LICENSE"]


def test_the_page_is_small() -> None:
    sent = [
        data for name, data in FILES.items() if name.split(".")[-1] in ("html", "js", "css", "svg")
    ]
    assert sum(len(gzip.compress(data, 6)) for data in sent) <= 60_000


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    for name, data in FILES.items():
        if name.startswith("uplot"):
            continue
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)^\s*//.*$|\s// .*$", "", text), name
        assert not re.search(
            r"\.innerHTML\s*=(?!=)|insertAdjacentHTML|document\.write|\beval\(", text
        ), name
        assert not re.search(r"\son\w+=\"|<style|\sstyle=", text), name  # which the CSP refuses


def test_the_wheel_has_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "views/dashboard/page/*" in project["tool"]["setuptools"]["package-data"]["launcher"]
