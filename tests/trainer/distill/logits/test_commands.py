"""`trainer distill inspect` and `verify`, as people and programs call them."""

import json
import os

import pytest
from click.testing import CliRunner

from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder
from trainer.commands.distill.inspect import inspect
from trainer.commands.distill.verify import verify
from trainer.distill.logits.dataset import SHARD_FILE
from trainer.distill.logits.heartbeat import TeacherHeartbeat
from trainer.system.errors import InputError, StorageError

DESCRIPTION = tiny_description(SCHEMES["topk"])


def call(command, *arguments):
    return CliRunner().invoke(command, [str(each) for each in arguments])


def flip(folder, number):
    path = folder.shard_path(number) / SHARD_FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_verify_counts_what_is_whole_and_what_is_missing(tmp_path):
    folder = tiny_folder(tmp_path, DESCRIPTION, write=[0, 2])
    result = call(verify, tmp_path)
    assert result.exit_code == 0
    assert "missing: shard-00001" in result.output
    assert "2 of 3 shards are whole: 52 of 65 tokens" in result.output
    result = call(verify, tmp_path, "--complete")
    assert isinstance(result.exception, StorageError)
    assert "1 of 3 shards are missing" in str(result.exception)
    assert folder.list_requests() == []


def test_verify_names_every_damaged_shard(tmp_path):
    folder = tiny_folder(tmp_path, DESCRIPTION)
    flip(folder, 0)
    os.truncate(folder.shard_path(2) / SHARD_FILE, 10)
    result = call(verify, tmp_path)
    assert isinstance(result.exception, StorageError)
    assert result.exception.exit_code == 6
    assert "damaged: shard-00000, shard-00002;" in str(result.exception)
    assert "shard-00000 is damaged: " in result.output
    assert "has 10 bytes" in result.output
    result = call(verify, tmp_path, "--json")
    assert isinstance(result.exception, StorageError)
    said = json.loads(result.output)
    assert (said["whole"], said["missing"], said["damaged"]) == (1, 0, 2)
    assert [each["state"] for each in said["verdicts"]] == ["damaged", "whole", "damaged"]
    assert folder.has_shard(0), "verify only looks"


@pytest.mark.parametrize("command", [inspect, verify])
def test_a_folder_that_is_none_is_one_line(tmp_path, command):
    result = call(command, tmp_path / "nowhere")
    assert isinstance(result.exception, InputError)
    assert "no teacher has started here" in str(result.exception)


@pytest.mark.parametrize("kind", SCHEMES)
def test_inspect_measures(tmp_path, kind):
    description = tiny_description(SCHEMES[kind])
    folder = tiny_folder(tmp_path, description, write=[0, 2])
    with TeacherHeartbeat(folder, "intel-1") as beat:
        beat.report_progress(shards_done=2, shards=3, tokens_per_second=812.0)
        beat.report_failure("the disk is full")
    result = call(inspect, tmp_path, "--json")
    assert result.exit_code == 0, result.exception
    said = json.loads(result.output)
    assert said["planned"] == {"shards": 3, "windows": 9, "tokens": 65}
    found = said["found"]
    assert (found["shards"], found["windows"], found["tokens"]) == (2, 7, 52)
    size = sum((folder.shard_path(n) / SHARD_FILE).stat().st_size for n in (0, 2))
    assert found["bytes"] == size
    assert found["bytes_per_token"] == size / 52

    windows = [window for number in (0, 2) for window in folder.read_shard(number)]
    contents = found["contents"]
    assert contents["positions"] == sum(contents["histogram"]) == 52 - 7
    entries = sum(len(window.scores.ids) for window in windows)
    assert contents["entries"] == pytest.approx(entries / 45)
    tails = [1 - float(each) for window in windows for each in window.scores.tail[1:]]
    if kind in ("topk", "kept"):
        assert contents["kept_mass"] == pytest.approx(sum(tails) / 45)
        assert contents["histogram"][9] == sum(each >= 0.9 for each in tails)
    else:
        assert contents["kept_mass"] == 1
    assert said["digest"] == description.digest
    assert said["teacher"]["digest"] == description.teacher.digest
    assert said["teachers"][0]["reason"] == "the disk is full"

    text = call(inspect, tmp_path).output
    for part in (
        "shards       2 of 3",
        f"{size / 52:.1f} a token",
        f"tokenizer    {description.tokenizer.digest}",
        "0.9 to 1.0 #",
        "intel-1: failed, 2 of 3 shards, 812 tokens/s: the disk is full",
    ):
        assert part in text


def test_inspect_names_what_cannot_be_read(tmp_path):
    folder = tiny_folder(tmp_path, DESCRIPTION)
    flip(folder, 1)
    text = call(inspect, tmp_path).output
    assert "damaged      " in text
    assert "shard-00001" in text
    assert "of 2 shards" in text


def test_inspect_knows_a_living_teacher_from_a_silent_one(tmp_path, monkeypatch):
    folder = tiny_folder(tmp_path, DESCRIPTION, write=[])
    monkeypatch.setattr("trainer.distill.logits.heartbeat.INTERVAL", 0.4)
    with (
        TeacherHeartbeat(folder, "lives", interval=0.02),
        TeacherHeartbeat(folder, "hangs", interval=3600),
    ):
        text = call(inspect, tmp_path).output
    assert "lives: running, 0 of 0 shards\n" in text
    assert "hangs: running, 0 of 0 shards, no recent heartbeat\n" in text
