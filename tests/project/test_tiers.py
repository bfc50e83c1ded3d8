"""What `make test` runs of the real processes: named by the stories of docs/testing.md."""

from __future__ import annotations

import re

from tests import ROOT

SMOKE = re.compile(r"^@pytest\.mark\.smoke\(\"([a-z ]+)\"\)$", re.MULTILINE)
CLUSTER = re.compile(r"^(?:pytestmark = .*|    |@)pytest\.mark\.cluster\b", re.MULTILINE)


def test_the_documented_stories_are_those_of_the_marks() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    table = page.partition("| story |")[2].partition("\n\n")[0]
    marked: set[str] = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        stories = SMOKE.findall(text)
        assert not stories or CLUSTER.search(text), f"{file}: smoke is a part of cluster"
        marked.update(stories)
    assert marked == set(re.findall(r"^\| `([a-z ]+)` \|", table, re.MULTILINE))
