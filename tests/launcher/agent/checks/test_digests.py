"""Digests of gigabytes are remembered, never beyond a change; differences are named."""

import json
import os
from pathlib import Path

import pytest

from launcher.agent.checks import digests as content
from launcher.agent.checks.digests import CACHE, describe_difference, hash_paths


def forge_memory(folder: Path, digest: str) -> int:
    """Put another digest into the memory: whoever gives it has not read the file again."""
    tree = json.loads((folder / CACHE).read_bytes())
    tree["files"] = {key: [mark, digest] for key, (mark, _) in tree["files"].items()}
    (folder / CACHE).write_text(json.dumps(tree))
    return len(tree["files"])


def test_a_digest_is_size_and_blake3(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    # BLAKE3 of "abc": the official test vectors' and b3sum's.
    known = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert hash_paths([tmp_path / "a"], tmp_path / "state") == {"a": f"3:{known}"}


def test_a_file_is_hashed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_MINIMUM_AGE", 0.0)  # nobody can set a ctime back
    file = tmp_path / "a"
    file.write_bytes(b"one")
    hash_paths([file], tmp_path / "state")
    assert forge_memory(tmp_path / "state", "remembered") == 1
    assert hash_paths([file], tmp_path / "state") == {"a": "remembered"}
    times = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as rsync -t and cp -p leave it
    assert hash_paths([file], tmp_path / "state")["a"].startswith("3:")


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    hash_paths([tmp_path / "a"], tmp_path / "state")
    assert not (tmp_path / "state" / CACHE).exists()


@pytest.mark.parametrize(
    "torn", [b"", b"{", b"[]", b"{}", b'{"schema": "motley.digests/1", "files": {"/a": 1}}']
)
def test_a_torn_memory_is_no_memory(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / CACHE).write_bytes(torn)
    (tmp_path / "a").write_bytes(b"one")
    assert hash_paths([tmp_path / "a"], tmp_path)["a"].startswith("3:")


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    (tmp_path / "a").write_bytes(b"one")
    assert hash_paths([tmp_path / "a"], tmp_path / "state")["a"].startswith("3:")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hash_paths([tmp_path / "absent"], tmp_path)


def test_differences_are_named() -> None:
    here = {"config.json": "1:a", "model-1.safetensors": "9:b", "extra": "1:c"}
    there = {"config.json": "1:a", "model-1.safetensors": "9:x", "tokenizer.json": "1:d"}
    words = describe_difference(here, there)
    assert words == "lacks tokenizer.json, also has extra, has another model-1.safetensors"
    assert describe_difference(here, dict(here)) == ""
    many = {f"f{n}": "1:a" for n in range(9)}
    assert describe_difference({}, many) == "lacks f0, f1, f2 and 6 more"
