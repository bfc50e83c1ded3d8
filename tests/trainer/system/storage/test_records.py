import json
from pathlib import Path

import pytest

from trainer.system.storage.atomic_file import replace_file
from trainer.system.storage.jsonl import LineFile, Outage, json_text


def test_an_outage_that_comes_and_goes_is_one_alarm(tmp_path: Path):
    alarms: list[str] = []
    outage = Outage(tmp_path, alarms.append)
    for _ in range(5):
        outage.note_failure("full")
        outage.note_success()
    assert len(alarms) == 1
    for _ in range(100):
        outage.note_success()
    outage.note_failure("full again")
    assert len(alarms) == 2


def test_lines_can_be_written_after_closing(tmp_path: Path):
    lines = LineFile(tmp_path / "new" / "file.jsonl", pytest.fail)
    lines.write("1")
    lines.close()
    lines.write("2")
    lines.close()
    assert (tmp_path / "new" / "file.jsonl").read_text() == "1\n2\n"


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "status.json"
    replace_file(path, "old")
    (tmp_path / ".status.json.tmp").mkdir()  # in the way
    with pytest.raises(OSError, match="directory"):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_json_is_strict_and_keys_are_text():
    tree = {1: [float("nan"), (float("inf"), 0.5)], "é": None}
    assert json.loads(json_text(tree)) == {"1": [None, [None, 0.5]], "é": None}
