"""What the documents name exists: linked pages and headings, and files of the project."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.project.command_blocks import DOCUMENTS, ROOT

LINK = re.compile(r"\]\(([^)\s:]+)\)")
FILE = re.compile(r"`(?:bash |python )?((?:[\w-]+/)+[\w.-]+\.(?:py|sh|yml|md|svg|c|txt))`")
CELL_BORDER = re.compile(r"(?<!\\)\|")
WITH_TABLES = sorted({*DOCUMENTS, *ROOT.glob("playbooks/**/*.md"), *ROOT.glob("tests/**/*.md")})
LONGEST_CELL = 160
"""Characters; what needs more stands as prose below its table."""
TREES = (
    "benchmarks",
    "docs",
    "inventory",
    "launcher",
    "playbooks",
    "recipes",
    "scripts",
    "tests",
    "trainer",
)
ANY = re.compile(r"[A-Z]{4,}(?=[./])(?<!README)")
"""What stands for any name, as in `playbooks/roles/ROLE/README.md`."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files(page: Path) -> None:
    missing = list[str]()
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        known = target.exists() and (not anchor or anchor in anchors(target))
        missing += [] if known else [link]
    for name in FILE.findall(page.read_text()):
        if name.split("/")[0] in TREES and not list(ROOT.glob(ANY.sub("*", name))):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("page", WITH_TABLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_of_tables_are_short(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in CELL_BORDER.split(row)]
    assert [cell for cell in cells if len(cell) > LONGEST_CELL] == []


def test_files_that_sources_name() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.sh", "*.yml", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    missing = {
        f"{name}: {page}"
        for name in listed.stdout.split()
        for page in re.findall(r"\bdocs/[\w-]+\.\w+", (ROOT / name).read_text())
        if not list(ROOT.glob(ANY.sub("*", page)))
    }
    assert not missing
