"""Subsets of a data set of the hub: one is read, and several without a choice are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import running_hub
from tests.trainer.data.test_sources import HUB, lines, put, texts
from trainer.data.sources import find_data
from trainer.data.subsets import read_subsets
from trainer.system.errors import InputError

FILES = {
    "main/train-0.jsonl": lines("main"),
    "main/test-0.jsonl": lines("main test"),
    "socratic/train-0.jsonl": lines("socratic"),
    "socratic/test-0.jsonl": lines("socratic test"),
    "notes.txt": b"a note",
}
MAIN = """
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
"""
SOCRATIC = MAIN.replace("main", "socratic")


def write(folder: Path, configs: str) -> Path:
    return put(folder, **FILES, **{"README.md": f"---\nconfigs:{configs}---\nA card.\n".encode()})


def test_several_subsets_are_refused_with_how_to_choose_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", MAIN + SOCRATIC)
    with pytest.raises(InputError) as caught:
        texts(folder)
    says = f"{folder}: contains the subsets main, socratic; choose one, such as {folder}/main"
    assert str(caught.value) == says
    assert texts(folder / "main") == ["main"]


@pytest.mark.parametrize(
    ("configs", "read"),
    [
        (MAIN, ["main"]),
        (MAIN + SOCRATIC + "  default: true\n", ["socratic"]),
        (MAIN + SOCRATIC.replace("name: socratic", "name: default"), ["socratic"]),
        ("\n- config_name: a\n  data_dir: socratic\n", ["socratic"]),
        ("\n- config_name: a\n  data_files: main/*.jsonl\n", ["main test", "main"]),
        ("\n- config_name: a\n  data_files: ['**/train-*']\n", ["main", "socratic"]),
        ("\n- config_name: a\n  data_files: {train: main/train-0.jsonl}\n", ["main"]),
        ("\n- config_name: a\n  data_dir: main\n  data_files: train-*\n", ["main"]),
        ("\n- config_name: a\n", ["main", "socratic"]),  # names no files
    ],
)
def test_the_subset_that_the_hubs_loader_takes_is_read(
    tmp_path: Path, configs: str, read: list[str]
) -> None:
    assert texts(write(tmp_path, configs)) == read


def test_what_a_subset_leaves_out_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, MAIN + "  default: true\n" + SOCRATIC)
    found = find_data(folder)
    assert found.left_out == {
        "split test": ["main/test-0.jsonl"],
        "subset socratic": ["socratic/test-0.jsonl", "socratic/train-0.jsonl"],
        "other files": ["README.md", "notes.txt"],
    }


def test_a_subset_without_a_folder_of_its_own_is_chosen_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path, MAIN.replace("name: main", "name: plain") + SOCRATIC)
    assert texts(folder / "plain") == ["main"]
    with pytest.raises(InputError, match="no such data file"):
        texts(folder / "other")


def test_a_subset_without_its_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, MAIN.replace("main/train", "main/absent"))
    with pytest.raises(InputError, match=r"of the subset main, whose files are called main/absent"):
        texts(folder)


@pytest.mark.parametrize(
    "readme",
    [
        *(b"no card", b"---\nconfigs: 1\n---\n", b"---\n: [\n---\n", b"---\nconfigs:\n- a\n---\n"),
        *(
            b"---\n" + b"[" * 5000 + b"\n---\n",
            b"\xff",
            b"---\nconfigs:\n- data_files: [{}]\n---\n",
        ),
    ],
)
def test_a_readme_that_names_no_subsets_changes_nothing(tmp_path: Path, readme: bytes) -> None:
    folder = put(tmp_path, **FILES, **{"README.md": readme})
    assert read_subsets(folder) == {}
    assert texts(folder) == ["main", "socratic"]


def test_a_pipe_in_place_of_a_readme_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "README.md")
    assert read_subsets(tmp_path) == {}


def test_of_the_hub_the_chosen_subset_alone_is_downloaded(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the launcher-only install has none")
    write(tmp_path / "set", MAIN.replace("name: main", "name: plain") + SOCRATIC)
    said: list[str] = []
    with running_hub() as hub:
        hub.folders["owner/name"] = tmp_path / "set"
        environment = {**os.environ, **hub.environment(tmp_path / "cache")}
        for path in ("hf://datasets/owner/name", "hf://datasets/owner/name/plain"):
            done = subprocess.run(
                [sys.executable, "-c", HUB, path],
                capture_output=True,
                text=True,
                timeout=300,
                env=environment,
            )
            said.append(done.stdout)
        offline = environment | {"HF_HUB_OFFLINE": "1"}
        again = [sys.executable, "-c", HUB, path]
        cached = subprocess.run(again, capture_output=True, text=True, timeout=300, env=offline)
        assert hub.asked == ["README.md", "main/train-0.jsonl"]
    says = (
        "contains the subsets plain, socratic; choose one, such as hf://datasets/owner/name/plain"
    )
    assert says in said[0]
    assert "['main']" in said[1]
    assert "['main']" in cached.stdout
