"""What holds for every file of the project: small rooms, and nothing of one person's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import ROOT

MOST_LINES = 450
TABLES = [
    "tests/trainer/exchange/test_lossy_codecs.py",
    "trainer/evaluate/syscalls.py",
    "trainer/replica/weights/nf4.py",
]
"""The files with a table that is laid out by hand."""
PUBLIC_INDEXES = ("pypi.org", "files.pythonhosted.org", "download.pytorch.org", "torch.example")

# Paths and addresses that exist on one machine or in one network only.
MACHINE_PATHS = re.compile(
    r"(?<![\w.$}~/-])/(?:work|scratch|mnt/data)/\w"
    r"|/home/(?!(?:motley|ops|user|you|\{|<|\$))\w+"
    r"|/root/\.\w"
    r"|/opt/\w*(?:wheel|pypi)"
)
INDEX_OPTIONS = re.compile(
    r"(?:index[-_]url|find[-_]links|CPU_INDEX)\W{1,6}(?P<url>\w+://[^\s\"')]+)"
)


def tracked() -> list[Path]:
    """Return the text files under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:1024]]


def test_no_file_names_a_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]}"
        for file in tracked()
        if file != Path(__file__)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for match in MACHINE_PATHS.finditer(line)
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_private_package_index() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match['url']}"
        for file in tracked()
        for match in INDEX_OPTIONS.finditer(file.read_text(encoding="utf-8"))
        if urlsplit(match["url"]).hostname not in PUBLIC_INDEXES
    ]
    assert not found, "\n".join(found)


def test_rooms_stay_small() -> None:
    sizes = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for file in tracked()
        if file.suffix in (".py", ".sh")
    }
    large = [f"{name}: {lines} lines" for name, lines in sizes.items() if lines > MOST_LINES]
    assert not large, f"split these, {MOST_LINES} lines at most:\n" + "\n".join(large)


def test_only_tables_keep_their_own_layout() -> None:
    """Rows of data may stand as they are, between `# fmt: off` and `# fmt: on`; a line may not."""
    skip, off = (
        re.compile(rf"^(?!.*[\"`]).*# fmt: {word}", re.MULTILINE) for word in ("skip", "off")
    )
    texts = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in tracked()
        if file.suffix == ".py"
    }
    assert [name for name, text in texts.items() if skip.search(text)] == []
    assert sorted(name for name, text in texts.items() if off.search(text)) == TABLES


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    assert not [file for file in tracked() if file.suffix == ".py" and file.stem in drawers]


def test_tests_import_each_other_by_their_full_names() -> None:
    """`tests.launcher.sshd`: with a path edited, one file is loaded twice under two names."""
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in tracked()
        if file.suffix == ".py" and file.is_relative_to(ROOT / "tests")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bsys\.path\b", line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["see /home/" + "alice/models", "cd /work/" + "project", "find-links = /opt/my" + "wheels"],
)
def test_machine_paths_are_recognised(line: str) -> None:
    assert MACHINE_PATHS.search(line)


@pytest.mark.parametrize("line", ["see docs/work/flow", "/home/motley/.ssh", "~/work/models"])
def test_ordinary_paths_are_not(line: str) -> None:
    assert not MACHINE_PATHS.search(line)
