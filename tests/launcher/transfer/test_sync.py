"""`launch sync` with a real rsync, on this machine and through a real sshd."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.checks import shared_folder as share_checks
from launcher.agent.checks.digests import file_content
from launcher.cli import run
from launcher.errors import ConfigError, PartialError, PreflightError, UnreachableError
from launcher.hosts import ssh
from launcher.inventory.hosts import Host
from launcher.transfer import rsync, sync
from tests.launcher.sshd import Server, running_sshd
from trainer.data.samples import read_samples
from trainer.data.sources import find_data
from trainer.system.errors import InputError

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server
    ssh.close_all()


@pytest.fixture
def far(server: Server, tmp_path: Path) -> Host:
    return server.host(
        state_folder=str(tmp_path / "far/state"), share_folder=str(tmp_path / "far/share")
    )


@pytest.fixture
def near(tmp_path: Path) -> Host:
    folder = tmp_path / "near"
    return Host(
        name="near",
        connection="local",
        state_folder=str(folder / "state"),
        share_folder=str(folder / "share"),
    )


@pytest.fixture
def said() -> list[str]:
    return []


def make_model(folder: Path, size: int = 2000, seed: bytes = b"1") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"seed": seed.decode()}))
    blocks = (hashlib.sha256(seed + str(i).encode()).digest() for i in range(size // 32 + 1))
    (folder / "model.safetensors").write_bytes(b"".join(blocks)[:size])
    return folder


def make_checkpoint(folder: Path, size: int = 500, seed: bytes = b"1") -> Path:
    make_model(folder, size, seed)
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_bytes(seed)
    files = {name: {"size": len(content), "blake3": ""} for name, content in content_of(folder)}
    manifest = {"schema": "motley.manifest/1", "files": files, "seed": seed.decode()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def same(one: Path, other: Path) -> bool:
    return dict(content_of(one)) == dict(content_of(other))


def content_of(folder: Path) -> list[tuple[str, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [(str(path.relative_to(folder)), path.read_bytes()) for path in files]


@pytest.mark.needs("rsync")
def test_inputs_reach_every_host(near: Host, far: Host, tmp_path: Path, said: list[str]) -> None:
    model = make_model(tmp_path / "qwen3-tiny")
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "a"}\n')
    done = sync.push_inputs([near, far], [model, data], said.append)
    assert [synced.host for synced in done] == ["near", "far"]
    for host, synced in zip((near, far), done, strict=True):
        inputs = Path(str(host.state_folder), "inputs")
        assert synced.folder == str(inputs)
        assert synced.moved.files == 3
        assert same(model, inputs / "qwen3-tiny")
        assert (inputs / "train.jsonl").read_bytes() == data.read_bytes()
    again = sync.push_inputs([near, far], [model, data], said.append)
    assert [synced.moved.files for synced in again] == [0, 0]
    assert "up to date" in again[0].describe


@pytest.mark.needs("rsync")
def test_links_of_a_model_cache_arrive_as_files(far: Host, tmp_path: Path, said: list[str]) -> None:
    blobs = make_model(tmp_path / "blobs")
    model = tmp_path / "snapshot"
    model.mkdir()
    for blob in blobs.iterdir():
        (model / blob.name).symlink_to(blob)
    sync.push_inputs([far], [model], said.append)
    arrived = Path(str(far.state_folder), "inputs/snapshot")
    assert same(blobs, arrived)
    assert not any(path.is_symlink() for path in arrived.iterdir())


@pytest.mark.needs("rsync")
def test_a_newer_model_leaves_nothing_of_the_old_one(
    far: Host, tmp_path: Path, said: list[str]
) -> None:
    model = make_model(tmp_path / "model")
    (model / "model-00002.safetensors").write_bytes(b"old")
    sync.push_inputs([far], [model], said.append)
    (model / "model-00002.safetensors").unlink()
    make_model(model, seed=b"2")
    sync.push_inputs([far], [model], said.append)
    assert same(model, Path(str(far.state_folder), "inputs/model"))


def write_texts(folder: Path) -> list[str]:
    (folder / "sub").mkdir(parents=True)
    for number in range(4):
        name = f"sub/{number} é.txt" if number % 2 else f"{number}.txt"
        (folder / name).write_text(f"text {number}\n\nagain\n")
    return ["text 0", "again", "text 2", "again", "text 1", "again", "text 3", "again"]


def write_shards(folder: Path) -> list[str]:
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    (folder / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        parquet.write_table(pa.table({"text": [f"of {name}"]}), folder / f"data/{name}.parquet")
    return ["of train-00000-of-00002", "of train-00001-of-00002"]


def write_saved(folder: Path) -> list[str]:
    """Write what `save_to_disk` of `datasets` writes."""
    pa = pytest.importorskip("pyarrow")
    (folder / "train").mkdir(parents=True)
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (folder / "train/state.json").write_text(json.dumps({"_data_files": files}))
    for number, file in enumerate(files):
        table = pa.table({"text": [f"row {number}"]})
        with pa.ipc.new_stream(folder / "train" / file["filename"], table.schema) as writer:
            writer.write_table(table)
    return ["row 0", "row 1"]


@pytest.mark.parametrize("write", [write_texts, write_shards, write_saved])
@pytest.mark.needs("rsync")
def test_a_folder_of_data_arrives_as_the_same_samples(
    far: Host, tmp_path: Path, said: list[str], write: Callable[[Path], list[str]]
) -> None:
    """Also through links, which are read here as they arrive there."""
    real, data = tmp_path / "real", tmp_path / "data"
    expected = write(real)
    data.mkdir()
    for path in real.iterdir():
        (data / path.name).symlink_to(path)
    sync.push_inputs([far], [data], said.append)
    arrived = Path(str(far.state_folder), "inputs/data")
    for folder in (data, arrived):
        assert [sample.text for sample in read_samples(folder, "causal-lm")] == expected
    assert file_content(str(data), str(tmp_path)) == file_content(str(arrived), str(tmp_path))
    gone = next(path for path in real.glob("*/*.*") if path.suffix != ".json")
    gone.unlink()
    sync.push_inputs([far], [data], said.append)
    assert not (arrived / gone.relative_to(real)).exists()


@pytest.mark.usefixtures("slow_rsync")
@pytest.mark.needs("rsync")
def test_data_that_broke_off_is_no_data_and_goes_on(
    far: Host, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    write_saved(data)
    (data / "train/data-00000-of-00002.arrow").write_bytes(os.urandom(SIZE))
    arrived = Path(str(far.state_folder), "inputs/data")
    with pytest.raises(KeyboardInterrupt):
        sync.push_inputs([far], [data], interrupt)
    with pytest.raises(InputError, match="contains no data files"):
        find_data(arrived)
    monkeypatch.undo()
    [done] = sync.push_inputs([far], [data], said.append)
    assert done.moved.sent < SIZE, "nothing of the first attempt was used"
    assert file_content(str(data), str(tmp_path)) == file_content(str(arrived), str(tmp_path))


@pytest.fixture
def slow_rsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the real rsync behind 16 MiB/s, so that there is a middle to break off in."""
    script = tmp_path / "bin/rsync"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shutil.which("rsync")} --bwlimit=16m "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


def interrupt(line: str) -> None:
    raise KeyboardInterrupt(line)


SIZE = 48 << 20


def partial_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob(f"{rsync.PARTIAL}/*"))


@pytest.mark.usefixtures("slow_rsync")
@pytest.mark.needs("rsync")
def test_a_push_that_broke_off_is_not_complete_and_goes_on(
    far: Host, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", seed=b"old")
    sync.push_inputs([far], [model], said.append)
    make_model(model, SIZE, b"new")
    arrived = Path(str(far.state_folder), "inputs/model")
    with pytest.raises(KeyboardInterrupt):
        sync.push_inputs([far], [model], interrupt)
    assert not (arrived / "config.json").exists(), "the old config vouches for a mixture"
    monkeypatch.undo()
    [done] = sync.push_inputs([far], [model], said.append)
    assert same(model, arrived)
    assert done.moved.files == 2
    assert done.moved.sent < SIZE, "nothing of the first attempt was used"


@pytest.mark.usefixtures("slow_rsync")
@pytest.mark.needs("rsync")
def test_a_pull_that_broke_off_shows_no_checkpoint_and_goes_on(
    far: Host, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Path(str(far.share_folder), "checkpoints/demo")
    step = make_checkpoint(there / "step-000010", SIZE)
    here = tmp_path / "here"
    with pytest.raises(KeyboardInterrupt):
        sync.pull_folder(far, "checkpoints", "", here, interrupt)
    assert not (here / "demo/step-000010/manifest.json").exists()
    assert partial_size(here) > 0
    monkeypatch.undo()
    done = sync.pull_folder(far, "checkpoints", "", here, said.append)
    assert done.complete == ("demo/step-000010",)
    assert done.moved.sent < SIZE
    assert same(step, here / "demo/step-000010")


@pytest.mark.needs("rsync")
def test_only_whole_checkpoints_arrive_and_links_follow(
    near: Host, far: Host, tmp_path: Path, said: list[str]
) -> None:
    for host in (near, far):
        run_folder = Path(str(host.share_folder), "checkpoints/demo")
        make_checkpoint(run_folder / "step-000010")
        make_checkpoint(run_folder / "step-000020", seed=b"2")
        torn = make_checkpoint(run_folder / "step-000030", seed=b"3")
        (torn / "model.safetensors").write_bytes(b"half")
        make_model(run_folder / ".tmp-step-000040-aa")
        (run_folder / "latest").symlink_to("step-000020")
        (run_folder / "best").symlink_to("step-000030")
        here = tmp_path / f"here-{host.name}"
        done = sync.pull_folder(host, "checkpoints", "", here, said.append)
        assert done.complete == ("demo/step-000010", "demo/step-000020")
        assert not (here / "demo/step-000030/manifest.json").exists()
        assert sorted(p.name for p in here.iterdir()) == ["demo"]
        assert not list(here.rglob(".tmp-*"))
        assert str((here / "demo/latest").readlink()) == "step-000020"
        assert not (here / "demo/best").is_symlink()
        assert f"{host.name}: demo/step-000030: was removed there meanwhile, skipped" in said
        only = sync.pull_folder(
            host, "checkpoints", "demo", tmp_path / f"only-{host.name}", said.append
        )
        assert only.complete == ("step-000010", "step-000020")


@pytest.mark.needs("rsync")
def test_another_checkpoint_of_the_same_name_replaces_the_old_one(
    far: Host, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Path(str(far.share_folder), "checkpoints/demo/step-000010")
    make_checkpoint(there)
    here = tmp_path / "here"
    sync.pull_folder(far, "checkpoints", "", here, said.append)
    make_checkpoint(there, seed=b"2")  # the same sizes: a manifest alone could not tell
    os.utime(there / "model.safetensors", (1, 1))
    transfer = sync.transfer_files

    def break_off(*arguments: object, **settings: object) -> rsync.TransferStats:
        if len(arguments) > 5:  # the one that brings the files
            raise UnreachableError("the link is cut")
        return transfer(*arguments, **settings)  # pyright: ignore

    monkeypatch.setattr(sync, "transfer_files", break_off)
    with pytest.raises(UnreachableError):
        sync.pull_folder(far, "checkpoints", "", here, said.append)
    assert not (here / "demo/step-000010/manifest.json").exists()
    monkeypatch.undo()
    sync.pull_folder(far, "checkpoints", "", here, said.append)
    assert same(there, here / "demo/step-000010")


@pytest.mark.needs("rsync")
def test_logits_go_to_hosts_without_a_mounted_share(
    near: Host, far: Host, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "logits/teacher")
    done = sync.push_logits([near, far], tmp_path / "logits", said.append)
    for host, synced in zip((near, far), done, strict=True):
        assert same(tmp_path / "logits/teacher", Path(str(host.share_folder), "logits/teacher"))
        assert synced.moved.files == 4
    monkeypatch.setattr(share_checks, "_last_mount", lambda path: (f"10.0.0.1:{path}", "nfs4"))
    make_checkpoint(tmp_path / "logits/another")
    [mounted] = sync.push_logits([near], tmp_path / "logits", said.append)
    assert mounted.describe == f"near: has them from 10.0.0.1:{near.share_folder}/logits"


@pytest.mark.needs("rsync")
def test_all_hosts_finish_and_every_error_is_said(
    near: Host, far: Host, tmp_path: Path, said: list[str]
) -> None:
    model = make_model(tmp_path / "model")
    inputs = Path(str(far.state_folder), "inputs")
    inputs.parent.mkdir(parents=True)
    inputs.write_text("a file is in the way")
    with pytest.raises(PartialError) as caught:
        sync.push_inputs([far, near], [model], said.append)
    assert "far" in str(caught.value)
    assert any(line.startswith("done: near: ") for line in caught.value.details)
    assert same(model, Path(str(near.state_folder), "inputs/model"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inputs", "nothing-here"], "nothing-here: does not exist"),
        (["inputs", "/dev/null"], "/dev/null: is neither a file nor a folder"),
        (["inputs", "a b.jsonl"], "only letters, digits"),
        (["inputs", "one/x", "two/x"], "would have the same name"),
        (["logits"], "--from HOST"),
        (["logits", "--from", "mars"], "--from mars: no such host"),
        (["checkpoints", "--name", "../etc"], "is not the name of a folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    for name in ("a b.jsonl", "one/x", "two/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert run(["sync", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.needs("rsync")
def test_the_command_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    make_model(tmp_path / "model")
    assert run(["sync", "inputs", str(tmp_path / "model"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["schema"] == "motley.sync/2"
    assert tree["content"] == "inputs"
    assert tree["hosts"][0]["files"] == 2
    assert same(tmp_path / "model", tmp_path / "state/inputs/model")


def test_a_machine_without_rsync_is_told_so(
    near: Host, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="rsync is missing on this machine"):
        sync.push_inputs([near], [make_model(tmp_path / "model")], said.append)
    old = tmp_path / "rsync"
    old.write_text("#!/bin/sh\necho 'openrsync: protocol version 29'\n")
    old.chmod(0o755)
    with pytest.raises(PreflightError, match=r"needs rsync 3\.2 or newer"):
        rsync.find_rsync()


def test_a_host_without_a_share_needs_to_say_where_it_is(near: Host) -> None:
    bare = Host(name="near", connection="local")
    with pytest.raises(ConfigError, match="motley_share_folder"):
        sync.find_endpoint(bare, ssh.connect_host(bare), "checkpoints")


@pytest.mark.needs("rsync")
def test_what_a_host_names_stays_in_the_folder_here(near: Host, tmp_path: Path) -> None:
    share = Path(str(near.share_folder)) / "checkpoints"
    make_checkpoint(share / "step-1")
    secret = make_checkpoint(tmp_path / "secret")
    named = {"up": "..", "path": "../secret/x", "line": "a\nb", "deep": "step-1/../../secret/x"}
    for name, files in ((name, {file: 1}) for name, file in named.items()):
        (share / name).mkdir()
        entries = {file: {"size": size, "blake3": ""} for file, size in files.items()}
        (share / name / "manifest.json").write_text(json.dumps({"files": entries}))
    (share / "linked").mkdir()
    (share / "linked" / "manifest.json").symlink_to(secret / "manifest.json")
    (share / "latest").symlink_to("..")
    (share / "best").symlink_to(secret)
    target = tmp_path / "here"
    done = sync.pull_folder(near, "checkpoints", "", target, lambda _: None)
    assert done.complete == ("step-1",)
    assert [path.name for path in target.iterdir()] == ["step-1"]
