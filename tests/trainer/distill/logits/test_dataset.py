"""A folder of logits: agreed on once, written whole, never believed when damaged."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.crash_at_every_step import OPERATIONS, CountingDisk
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder, tiny_windows
from tests.waiting import PATIENCE
from trainer.distill.logits.dataset import DATASET, SHARD_FILE, LogitsFolder
from trainer.system.errors import InputError, RefusedError, StorageError
from trainer.system.storage import atomic_folder

TOPK = tiny_description(SCHEMES["topk"])


def test_what_is_described_comes_back(tmp_path):
    folder = tiny_folder(tmp_path / "out", TOPK, write=[])
    again = LogitsFolder(tmp_path / "out")
    assert again.description == TOPK
    assert again.digest == folder.digest == TOPK.digest
    assert (TOPK.windows, TOPK.tokens) == (9, 65)
    assert json.loads((tmp_path / "out" / DATASET).read_text())["schema"] == "motley.logits/1"
    assert again.list_missing() == [0, 1, 2]


def test_dataset_json_is_read_without_pyarrow(tmp_path):
    tiny_folder(tmp_path, TOPK, write=[0])
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "import trainer.distill.logits.heartbeat, trainer.distill.logits.targets\n"
        "import trainer.distill.logits.stream\n"
        "from trainer.distill.logits.dataset import LogitsFolder\n"
        "print(LogitsFolder(Path(sys.argv[1])).list_missing())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1, 2]\n"


OTHERS = {
    "teacher.digest": replace(TOPK, teacher=replace(TOPK.teacher, digest="u" * 64)),
    "teacher.dtype": replace(TOPK, teacher=replace(TOPK.teacher, dtype="bfloat16")),
    "tokenizer.digest": replace(TOPK, tokenizer=replace(TOPK.tokenizer, digest="w" * 64)),
    "corpus.digest": replace(TOPK, corpus=replace(TOPK.corpus, digest="d" * 64)),
    "scheme.top_k": replace(TOPK, scheme=replace(TOPK.scheme, top_k=5)),
    "values": replace(TOPK, values="float32"),
    "max_seq_len": replace(TOPK, max_seq_len=11),
    "seed": replace(TOPK, seed=8),
    "the split into shards": tiny_description(SCHEMES["topk"], shards=((0, 3), (3, 6))),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_teacher_is_refused_with_both_values(tmp_path, field):
    tiny_folder(tmp_path, TOPK, write=[])
    with pytest.raises(RefusedError, match=field) as caught:
        LogitsFolder(tmp_path).write_description(OTHERS[field])
    if field.endswith("digest"):
        part = field.partition(".")[0]
        for each in (TOPK, OTHERS[field]):
            assert getattr(each, part).digest in str(caught.value)
    assert LogitsFolder(tmp_path).description == TOPK


def test_the_same_teacher_at_another_path_is_accepted(tmp_path):
    tiny_folder(tmp_path, TOPK, write=[])
    moved = replace(TOPK, teacher=replace(TOPK.teacher, name="/mnt/tiny"))
    assert LogitsFolder(tmp_path).write_description(moved) == TOPK


@pytest.mark.parametrize("seeds", [(7, 7, 7), (7, 8, 9)])
def test_of_several_that_describe_at_once_one_wins(tmp_path, seeds):
    script = [sys.executable, "-m", "tests.trainer.describe_at_once", tmp_path]
    done = subprocess.run(
        [*script, *map(str, seeds)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    winner = LogitsFolder(tmp_path).description.seed
    accepted = [seed for seed in said if isinstance(seed, int)]
    assert accepted == [winner] * seeds.count(winner)
    refused = [text for text in said if isinstance(text, str)]
    assert all(f"seed is {winner} there" in text for text in refused)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree | {"schema": "motley.logits/9"}, "motley.logits/9"),
        (lambda tree: {k: v for k, v in tree.items() if k != "corpus"}, "corpus: Field required"),
        (lambda tree: tree | {"seed": "many"}, "seed"),
        (lambda tree: tree | {"shards": tree["shards"][1:]}, "shard 0 does not begin at"),
        (lambda tree: tree | {"shards": tree["shards"][:2]}, "end at document 4 of 6"),
        (lambda tree: [], "should be a valid dictionary"),
    ],
)
def test_a_wrong_dataset_json_is_one_line(tmp_path, change, message):
    tree = json.loads(TOPK.to_json())
    (tmp_path / DATASET).write_text(json.dumps(change(tree)))
    with pytest.raises(InputError, match=message) as caught:
        _ = LogitsFolder(tmp_path).description
    assert "\n" not in str(caught.value)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": lambda shard: flip(shard / SHARD_FILE),
    "a cut file": lambda shard: os.truncate(shard / SHARD_FILE, 100),
    "a manifest without its file": lambda shard: (shard / SHARD_FILE).unlink(),
    "a damaged manifest": lambda shard: (shard / atomic_folder.MANIFEST).write_text('{"schema'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_set_aside_and_asked_for_again(tmp_path, damage):
    folder = tiny_folder(tmp_path, TOPK)
    shard = folder.shard_path(1)
    DAMAGE[damage](shard)
    for read in (folder.read_shard, folder.verify_shard):
        with pytest.raises(StorageError, match="shard-00001") as caught:
            read(1)
    assert folder.has_shard(1)
    assert folder.is_complete(1) == (damage == "a flipped bit")  # sizes do not tell
    aside = folder.quarantine_shard(1, str(caught.value))
    assert aside is not None
    assert aside.parent == tmp_path / "quarantine"
    assert not folder.has_shard(1)
    assert folder.list_requests() == folder.list_missing() == [1]
    assert folder.quarantine_shard(1, "another student is late") is None

    folder.write_shard(1, tiny_windows(TOPK, 1))
    folder.verify_shard(1)
    assert folder.list_requests() == folder.list_missing() == []
    assert folder.quarantine_shard(1, "another student is late") is None, (
        "a whole shard was moved away"
    )


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_a_shard_is_moved_away_only_after_its_request(tmp_path, monkeypatch, call):
    """If the process dies in between, or the disk is full, a teacher still makes it again."""
    folder = tiny_folder(tmp_path, TOPK)
    flip(folder.shard_path(1) / SHARD_FILE)
    full = OSError(errno.ENOSPC, "No space left on device")
    where = Path if call == "rename" else os

    def failing(*_):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(where, call, failing)
        with pytest.raises(StorageError, match="No space left on device"):
            folder.quarantine_shard(1, "flipped")
    assert folder.has_shard(1)
    assert folder.list_requests() == ([1] if call == "rename" else [])
    assert folder.quarantine_shard(1, "flipped") is not None
    assert folder.list_requests() == [1]


def test_a_copy_without_empty_folders_is_as_good(tmp_path):
    folder = tiny_folder(tmp_path, TOPK)
    for part in ("quarantine", "requests", "teachers"):
        (tmp_path / part).rmdir()
    flip(folder.shard_path(1) / SHARD_FILE)
    assert folder.list_requests() == []
    assert folder.quarantine_shard(1, "flipped") is not None
    assert folder.list_requests() == [1]


def test_a_shard_of_another_folder_is_damage(tmp_path):
    folder = tiny_folder(tmp_path / "a", TOPK)
    other = tiny_folder(tmp_path / "b", OTHERS["teacher.digest"])
    folder.shard_path(1).rename(tmp_path / "gone")
    other.shard_path(1).rename(folder.shard_path(1))
    with pytest.raises(StorageError, match=r"motley\.dataset"):
        folder.read_shard(1)
    other.shard_path(2).rename(other.shard_path(1))
    with pytest.raises(StorageError, match=r"motley\.shard"):
        other.read_shard(1)


def test_a_folder_without_its_manifest_is_not_there_yet(tmp_path):
    """As seen while rsync brings a shard: its manifest travels last."""
    folder = tiny_folder(tmp_path, TOPK)
    (folder.shard_path(1) / atomic_folder.MANIFEST).unlink()
    assert not folder.has_shard(1)
    assert folder.list_missing() == [1]


def test_a_whole_shard_is_not_written_again(tmp_path):
    folder = tiny_folder(tmp_path, TOPK)
    before = (folder.shard_path(1) / SHARD_FILE).stat()
    folder.write_shard(1, tiny_windows(TOPK, 1))
    after = (folder.shard_path(1) / SHARD_FILE).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_windows_of_another_corpus_are_not_written(tmp_path):
    folder = tiny_folder(tmp_path, TOPK, write=[])
    with pytest.raises(InputError, match="has the corpus or tokenizer changed"):
        folder.write_shard(1, tiny_windows(TOPK, 1)[:-1])
    assert not folder.has_shard(1)


@pytest.mark.long
def test_a_kill_at_any_operation_leaves_no_shard_or_a_whole_one(tmp_path):
    script = [sys.executable, "-m", "tests.trainer.crash_while_writing_logits"]
    done = subprocess.run([*script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["exit_code"] for each in results].count(0) == 2
    assert {(each["there"], each["windows"]) for each in results} == {(False, None), (True, 2)}
    for result in results:
        assert result["missing"] == [0, 2], result
        assert result["requests"] == [], result
        assert all(name.startswith(f".{DATASET}-") for name in result["hidden"]), result
    described = [each["described"] for each in results if not each["damage"]]
    assert described == sorted(described)


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"link", "remove_tree"}))
def test_a_full_disk_leaves_no_shard_and_says_so(tmp_path, operation):
    folder = tiny_folder(tmp_path, TOPK, write=[])

    def fail(count, name, arguments):
        if name == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match=r"shard-00001: not written: No space left on device"):
        folder.write_shard(1, tiny_windows(TOPK, 1), CountingDisk(fail))
    assert not folder.shard_path(1).exists()
    assert [path.name for path in tmp_path.glob(".*")] == []
    folder.write_shard(1, tiny_windows(TOPK, 1))
    folder.verify_shard(1)


@pytest.mark.parametrize("part", ["teachers", "requests", "quarantine"])
def test_a_disk_that_is_full_at_a_folder_says_so(tmp_path, monkeypatch, part):
    make = Path.mkdir

    def full(path, *arguments, **options):
        if path.name == part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *arguments, **options)

    folder = LogitsFolder(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(StorageError, match=rf"{part}: not made: No space left"):
            folder.write_description(TOPK)
    folder.write_description(TOPK)


def test_a_file_in_place_of_a_folder_is_another_output(tmp_path):
    (tmp_path / "requests").touch()
    with pytest.raises(InputError, match="requests: is a file, choose another output"):
        LogitsFolder(tmp_path).write_description(TOPK)


def test_a_full_disk_leaves_no_dataset_json(tmp_path):
    def fail(count, name, arguments):
        if name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match="not written: No space left on device"):
        LogitsFolder(tmp_path).write_description(TOPK, CountingDisk(fail))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
