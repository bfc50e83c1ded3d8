"""Reading checkpoints back: nothing is believed that the manifest does not prove."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3

from tests.trainer.tiny_run import make_store, save, tiny_config, tiny_layout, tiny_state
from trainer.checkpoint.reader import find_checkpoint, read_progress
from trainer.checkpoint.store import CheckpointStore
from trainer.system.errors import InputError, StorageError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return make_store(tmp_path / "checkpoints")


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "run.json"],
)
@pytest.mark.parametrize("damage", ["first byte", "last byte", "truncated", "missing", "longer"])
def test_damage_is_found_and_the_newest_intact_one_taken(
    store: CheckpointStore, name: str, damage: str, caplog: pytest.LogCaptureFixture
):
    save(store, 1)
    file = save(store, 2) / name
    match damage:
        case "first byte":
            flip(file, 0)
        case "last byte":
            flip(file, -1)
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "missing":
            file.unlink()
        case "longer":
            file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(StorageError, match=name):
        store.load(file.parent)
    restored = make_store(store.folder).restore()
    assert restored is not None
    assert restored.progress.step == 1
    assert len(restored.rejected) == 1
    assert name in restored.rejected[0]
    assert name in caplog.text
    # The run goes on and writes the lost step again.
    save(store, 2)
    again = store.restore()
    assert again is not None
    assert (again.progress.step, again.rejected) == (2, ())


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"schema": "other/9", "files": {}}', b'{"schema": "motley.manifest/1"}'],
)
def test_a_damaged_manifest_is_refused(store: CheckpointStore, text: bytes):
    save(store, 1)
    (save(store, 2) / "manifest.json").write_bytes(text)
    assert store.latest_checkpoint() == store.folder / "step-000001"
    restored = store.restore()
    assert restored is not None
    assert restored.progress.step == 1
    assert "manifest.json" in restored.rejected[0]


def test_every_flipped_byte_of_the_manifest_is_harmless(store: CheckpointStore):
    path = save(store, 1)
    digest = tiny_state(1).compute_digest()
    intact = (path / "manifest.json").read_bytes()
    for offset in range(len(intact)):
        flip(path / "manifest.json", offset)
        with suppress(StorageError):
            assert store.load(path)[0].compute_digest() == digest
        (path / "manifest.json").write_bytes(intact)


def test_a_manifest_cannot_name_files_elsewhere(store: CheckpointStore):
    path = save(store, 1)
    manifest = json.loads((path / "manifest.json").read_bytes())
    secret = store.folder.parent / "secret"
    secret.write_text("s")
    manifest["files"]["../../secret"] = {"size": 1, "blake3": blake3(b"s").hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="secret"):
        store.load(path)


def test_a_checkpoint_of_another_model_is_an_input_error(store: CheckpointStore):
    path = save(store, 1)
    other = CheckpointStore(store.folder, tiny_layout(width=8), tiny_config(), Path("base"))
    with pytest.raises(InputError, match="another model"):
        other.load(path)
    with pytest.raises(InputError, match="another model"):
        other.restore()


def test_nothing_to_restore(store: CheckpointStore, tmp_path: Path):
    assert store.restore() is None
    assert store.latest_checkpoint() is None
    assert store.best_checkpoint() is None
    with pytest.raises(InputError, match="no intact checkpoint"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_from_before_there_were_students(store: CheckpointStore):
    path = save(store, 1)
    run = json.loads((path / "run.json").read_bytes())
    del run["logits_position"]
    (path / "run.json").write_text(json.dumps(run))
    assert read_progress(path).logits_position is None
    del run["epoch_samples"]
    (path / "run.json").write_text(json.dumps(run))
    with pytest.raises(StorageError, match="epoch_samples: Field required"):
        read_progress(path)
