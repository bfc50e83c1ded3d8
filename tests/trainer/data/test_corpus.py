import errno
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.commands.generate_data import generate_data
from trainer.data import corpus
from trainer.data.corpus import write_shell_safety
from trainer.data.samples import read_samples
from trainer.system.errors import InputError, StorageError
from trainer.system.storage import atomic_folder


def test_the_folder_holds_both_splits_and_verifies(tmp_path):
    folder = write_shell_safety(tmp_path / "deep" / "data", 20, 10, seed=0)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "train.jsonl",
        "validation.jsonl",
    ]
    assert set(atomic_folder.verify_folder(folder)) == {"train.jsonl", "validation.jsonl"}
    assert len(read_samples(folder / "train.jsonl", "classify", 5)) == 20
    assert len(read_samples(folder / "validation.jsonl", "classify", 5)) == 10


def test_an_earlier_corpus_is_replaced_and_other_files_never(tmp_path):
    folder = write_shell_safety(tmp_path / "data", 20, 10, seed=0)
    before = (folder / "train.jsonl").read_bytes()
    write_shell_safety(folder, 20, 10, seed=1)
    assert (folder / "train.jsonl").read_bytes() != before
    (folder / "train.jsonl").write_text("edited")
    write_shell_safety(folder, 20, 10, seed=0)
    assert (folder / "train.jsonl").read_bytes() == before
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="contains other files"):
        write_shell_safety(folder, 20, 10, seed=0)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is a file"):
        write_shell_safety(folder / "notes.txt", 20, 10, seed=0)


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    """A shell in it would be left in a folder that is gone."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is the current folder"):
        write_shell_safety(Path(), 20, 10, seed=0)


def test_a_full_disk_leaves_the_earlier_corpus(tmp_path, monkeypatch):
    class FullDisk(atomic_folder.Disk):
        def write(self, descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    folder = write_shell_safety(tmp_path / "data", 20, 10, seed=0)
    monkeypatch.setattr(corpus, "Disk", FullDisk)
    with pytest.raises(StorageError, match="No space left"):
        write_shell_safety(folder, 30, 10, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    atomic_folder.verify_folder(folder)


def test_the_command(tmp_path):
    arguments = ["shell-safety", "--count", "10", "--validation-count", "5", "-o"]
    result = CliRunner().invoke(generate_data, [*arguments, str(tmp_path / "data")])
    assert result.exit_code == 0
    assert "10 training and 5 validation scripts" in result.output
    assert CliRunner().invoke(generate_data, ["other", "-o", "x"]).exit_code == 2
