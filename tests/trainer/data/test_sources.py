"""Data is a file, a pipe, a folder or a data set of the hub; each is read once as the same."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub import running_hub
from trainer.data.documents import Documents
from trainer.data.samples import hash_files, read_file, read_samples
from trainer.data.sources import find_data
from trainer.system.errors import InputError


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts(path: Path) -> list[str]:
    return [sample.text for sample in read_samples(path, "causal-lm")]


def put(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_a_folder_is_its_data_files_in_the_order_of_their_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(
        tmp_path / "d",
        **{
            "b.csv": b"text,n\nfrom b,1\n",
            "a/2.jsonl.gz": gzip.compress(lines("from a/2")),
            "a/10.jsonl": lines("from a/10", "again"),
            "README.md": b"no data",
            "dataset_infos.json": b"{}",
            ".hidden.jsonl": lines("hidden"),
            "picture.png": b"\x89PNG",
        },
    )
    caplog.set_level("INFO")
    file = read_file(tmp_path / "d", "causal-lm")
    assert [s.text for s in file.samples] == ["from a/10", "again", "from a/2", "from b"]
    assert file.samples[1].place(file.path) == f"{tmp_path}/d/a/10.jsonl:2"
    assert (
        "reads 3 files; leaves out: documentation (1: README.md),"
        " other files (2: dataset_infos.json, picture.png), hidden (1: .hidden.jsonl)"
    ) in caplog.text


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["train-00000.jsonl", "test-00000.jsonl"], ["train-00000.jsonl"]),
        (["data/train.jsonl", "data/validation.jsonl", "extra.jsonl"], ["data/train.jsonl"]),
        (["train/test_notes.jsonl", "train/b.jsonl"], ["train/b.jsonl"]),
        (["my_training_set.jsonl", "dev.jsonl"], ["my_training_set.jsonl"]),
        (["constrained.jsonl", "latest.jsonl", "devices.jsonl"], None),
        (["all.jsonl", "test.jsonl"], ["all.jsonl"]),
        (["test.jsonl", "test2.jsonl"], None),
    ],
)
def test_names_tell_the_split_that_is_trained_on(
    tmp_path: Path, names: list[str], chosen: list[str] | None
) -> None:
    put(tmp_path, **{name: lines("x") for name in names})
    expected = [tmp_path / name for name in sorted(chosen or names)]
    assert find_data(tmp_path).files == expected


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("a.txt test.md train.text", "train.text"),
        ("train.txt valid.txt.gz test.txt README.md LICENSE", "train.txt"),
        ("wiki.train.txt wiki.valid.txt wiki.test.txt", "wiki.train.txt"),
        ("train-00.txt train-01.txt valid-00.txt", "train-00.txt train-01.txt"),
        ("en/train.txt de/train.txt en/dev.txt", "en/train.txt de/train.txt"),
        ("train/pos/a.txt train/neg/b.txt test/c.txt", "train/pos/a.txt train/neg/b.txt"),
        (
            "train/a/last-test.txt train/b/1.txt test/a/x.txt",
            "train/a/last-test.txt train/b/1.txt",
        ),
        ("train/urls.txt train/pos/1.txt train/neg/1.txt", "train/pos/1.txt train/neg/1.txt"),
        ("Night-Train.txt A-Final-Test.txt Emma.txt", None),
        ("night_train.txt sea.txt", None),
        ("chapter.txt test.txt", "chapter.txt"),
        ("book.txt README.md readme.txt LICENSE-MIT.txt CITATION.cff COPYING", "book.txt"),
        ("readers.txt noticeboard.md", None),
        ("readme.jsonl a.jsonl", None),
    ],
)
def test_names_of_texts_are_free(tmp_path: Path, names: str, chosen: str | None) -> None:
    put(tmp_path, **{name: lines("x") for name in names.split()})
    expected = {tmp_path / name for name in (chosen or names).split()}
    assert set(find_data(tmp_path).files) == expected


def test_splits_without_train_are_refused(tmp_path: Path) -> None:
    put(tmp_path, **{"validation.jsonl": lines("x"), "test.jsonl": lines("y")})
    with pytest.raises(InputError, match="contains the splits test, validation and none is called"):
        find_data(tmp_path)


def test_splits_of_texts_without_train_are_refused(tmp_path: Path) -> None:
    put(tmp_path, **{"valid.txt": b"x\n", "test.txt": b"y\n"})
    with pytest.raises(InputError, match="contains the splits test, validation and none is called"):
        find_data(tmp_path)


@pytest.mark.parametrize("read", [texts, lambda path: [each.text for each in Documents([path])]])
def test_texts_of_other_splits_are_neither_samples_nor_documents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: Callable[[Path], list[str]]
) -> None:
    names = ("train.txt", "valid.txt", "test.txt", "README.md", "LICENSE")
    put(tmp_path, **{name: name.encode() for name in names})
    caplog.set_level("INFO")
    assert read(tmp_path) == ["train.txt"]
    out = "documentation (2: LICENSE, README.md), split test (1: test.txt)"
    assert f"reads train.txt; leaves out: {out}, split validation (1: valid.txt)" in caplog.text


def test_labels_that_are_names_of_folders_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("train/pos/1.txt", "train/neg/1.txt", "train/urls.txt", "test/pos/1.txt")
    put(tmp_path, **{name: name.encode() for name in names})
    caplog.set_level("INFO")
    assert sorted(texts(tmp_path)) == ["train/neg/1.txt", "train/pos/1.txt"]
    out = "beside the folders of labels (1: train/urls.txt)"
    assert f"{out}, labels in the names of folders (2: neg, pos)" in caplog.text


def test_a_program_is_documents_with_its_tests_and_readme(tmp_path: Path) -> None:
    names = ("README.md", "train.py", "test.py", "notes/test.txt", "notes/train.txt")
    put(tmp_path, **{name: name.encode() for name in names})
    assert sorted(each.text for each in Documents([tmp_path])) == sorted(names)


@pytest.mark.parametrize("files", [{}, {"a.png": b"x"}, {"a.jsonl/b.png": b"x"}])
def test_a_folder_without_data_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    put(tmp_path, **files)
    with pytest.raises(InputError, match="contains no data files, whose names end in one of"):
        find_data(tmp_path)


def test_documentation_alone_is_no_data(tmp_path: Path) -> None:
    put(tmp_path, **{"README.md": b"a card"})
    with pytest.raises(InputError, match=r"contains no data files but README\.md, whose"):
        find_data(tmp_path)


def test_a_bad_line_of_a_folder_is_named_by_its_file(tmp_path: Path) -> None:
    put(tmp_path, **{"a.jsonl": lines("x"), "b.jsonl": lines("x") + b"oops\n"})
    with pytest.raises(InputError, match=rf"^{tmp_path}/b\.jsonl:2: not JSON"):
        read_samples(tmp_path, "causal-lm")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_once_and_its_lines_are_named(tmp_path: Path, pack) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = pack(lines("one", "two"))
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    file = read_file(pipe, "causal-lm")
    writer.join()
    assert [sample.text for sample in file.samples] == ["one", "two"]
    assert file.samples[1].place(file.path) == f"{pipe}:2"
    assert texts(pipe) == ["one", "two"]  # again, without a writer
    (tmp_path / "same").write_bytes(content)
    assert hash_files([pipe]).digest() == hash_files([tmp_path / "same"]).digest()


def test_the_copy_of_a_pipe_goes_with_the_process(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from trainer.data.sources import find_data;"
        " print(find_data(Path('/dev/stdin')).files[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=lines("x"),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.startswith(str(tmp_path).encode())
    assert not list(tmp_path.iterdir())


def test_what_is_no_data_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, says in {
            tmp_path / "none.jsonl": "none.jsonl: no such data file$",
            Path("-"): "standard input is /dev/stdin",
            Path("owner/name"): "is hf://datasets/owner/name",
            Path("hf://datasets/owner/name/../.."): r"neither a data set of .* without \.\.",
            Path("hf://datasets/../name"): "^hf://datasets/../name: neither a data set of the hub",
            Path("hf://models/owner/name"): "neither a data set of the hub",
            Path("/dev/zero"): "is a device or a socket",
            tmp_path / "socket": "is a device or a socket",
        }.items():
            with pytest.raises(InputError, match=says) as caught:
                read_samples(path, "causal-lm")
            assert "\n" not in str(caught.value)
            with pytest.raises(InputError, match=says):
                hash_files([path])


def in_hub_cache(cache: Path, **files: bytes) -> None:
    """Write a data set as the hub's client keeps it."""
    folder = cache / "datasets--owner--name"
    put(folder / "snapshots" / "0123abc", **files)
    put(folder / "refs", main=b"0123abc")


HUB = """
import sys, logging
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from pathlib import Path
from trainer.data.samples import read_samples
from trainer.system.errors import InputError
try:
    print([sample.text for sample in read_samples(Path(sys.argv[1]), "causal-lm")])
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("hf://datasets/owner/name", "['learned']"),
        ("hf://datasets/owner/name@main/data/test-0.jsonl", "['held out']"),
        ("hf://datasets/owner/name/more", "['more']"),
        ("hf://datasets/owner/name/none.jsonl", "the data set has no none.jsonl"),
        ("hf://datasets/owner/unknown", "the hub cannot be reached ("),
    ],
)
def test_a_data_set_of_the_hub_is_taken_from_its_cache(
    tmp_path: Path, path: str, says: str
) -> None:
    pytest.importorskip("huggingface_hub", reason="the launcher-only install has none")
    in_hub_cache(
        tmp_path,
        **{
            "data/train-0.jsonl": lines("learned"),
            "data/test-0.jsonl": lines("held out"),
            "more/a.jsonl": lines("more"),
            "README.md": b"a card",
        },
    )
    done = subprocess.run(
        [sys.executable, "-c", HUB, path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)},
    )
    assert says in done.stdout, done.stderr
    if path == "hf://datasets/owner/name":
        out = "documentation (1: README.md), split test (1: data/test-0.jsonl)"
        more = "no split in the name (1: more/a.jsonl)"
        assert f"leaves out: {out}, {more}" in done.stdout


def test_a_folder_behind_a_link_is_read_and_a_circle_is_not(tmp_path: Path) -> None:
    put(tmp_path / "d", **{"a.jsonl": lines("a")})
    put(tmp_path / "elsewhere", **{"b.jsonl": lines("b")})
    (tmp_path / "d" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "up").symlink_to(tmp_path)
    assert texts(tmp_path / "d") == ["a", "b"]


def test_a_data_set_of_the_hub_is_downloaded_without_what_is_left_out(tmp_path: Path) -> None:
    """The line names the commit, which pins the data set."""
    pytest.importorskip("huggingface_hub", reason="the launcher-only install has none")
    put(
        tmp_path / "set",
        **{
            "data/train-0.jsonl": lines("learned"),
            "data/test-0.jsonl": lines("held out"),
            "README.md": b"a card",
        },
    )
    with running_hub() as hub:
        hub.folders["owner/name"] = tmp_path / "set"
        env = {**os.environ, **hub.environment(tmp_path / "cache")}
        said: list[str] = []
        for name in ("owner/name", "owner/none"):
            done = subprocess.run(
                [sys.executable, "-c", HUB, f"hf://datasets/{name}"],
                capture_output=True,
                text=True,
                timeout=300,
                env=env,
            )
            said.append(done.stdout)
        commit = hub.revision("owner/name")
        assert hub.asked == ["README.md", "data/train-0.jsonl"]
    assert "['learned']" in said[0]
    out = "leaves out: documentation (1: README.md), split test (1: data/test-0.jsonl)"
    assert f"hf://datasets/owner/name: reads train-0.jsonl of @{commit}; {out}" in said[0]
    assert "hf://datasets/owner/none: the hub has no such data set or revision" in said[1]
