"""Hub names: what counts as one, what the local cache holds, and what preflight says of them."""

import shutil
from pathlib import Path

import pytest

from launcher.agent.checks.job import check_model, model_folder
from launcher.plan import hub
from launcher.plan.configuration import resolve_config
from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig

NAME = "motley-tests/tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_data(folder / "train.jsonl", count=20)
    return write_model(folder / "model", folder / "train.jsonl")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, with an empty cache, online."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def config(path: str) -> RunConfig:
    return resolve_config("quickstart", {"model.path": path}, Path.cwd())


def fill_cache(model: Path) -> Path:
    """Lay a model into the hub cache as huggingface_hub does."""
    home = hub.cache_folder() / "models--motley-tests--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abcd")
    shutil.copytree(model, home / "snapshots" / "0123abcd")
    return home / "snapshots" / "0123abcd"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Qwen/Qwen3-4B", True),
        ("Qwen/Qwen3-0.6B", True),
        ("demo/model", True),
        ("Qwen3-4B", False),
        ("./demo", False),
        ("../model", False),
        ("/models/qwen", False),
        ("~/model", False),
        ("a/b/c", False),
        ("my models/qwen", False),
        ("demo/", False),
    ],
)
def test_the_shape_of_a_hub_name(value: str, expected: bool) -> None:
    assert hub.is_hub_name(value, Path.cwd()) is expected
    assert (config(value).model.path == value) is (expected or value.startswith("/"))


def test_a_folder_that_is_there_is_no_hub_name(model: Path) -> None:
    shutil.copytree(model, NAME)
    settings = config(NAME)
    assert settings.model.path == str(Path.cwd() / NAME)
    assert check_model(settings).status == "ok"


def test_a_name_that_only_the_hub_can_have_is_left_to_the_trainer() -> None:
    finding = check_model(config("Qwen/Qwen3-4B"))
    assert finding.status == "warn"
    assert "no model folder Qwen/Qwen3-4B, so it is treated as a hub name" in finding.detail
    assert "the trainer will download it" in finding.remedy


def test_a_name_beside_a_folder_of_its_owner_is_a_missing_folder() -> None:
    Path("demo").mkdir()
    finding = check_model(config("demo/model"))
    assert finding.status == "fail"
    assert finding.detail.startswith("no model folder demo/model; not treated as a hub name")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_a_name_has_to_be_in_the_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    finding = check_model(config(NAME))
    assert finding.status == "fail"
    assert f"no model folder {NAME}; no complete copy of that hub name" in finding.detail
    assert str(hub.cache_folder()) in finding.detail
    snapshot = fill_cache(model)
    finding = check_model(config(NAME))
    assert finding.status == "ok"
    assert str(snapshot) in finding.detail


def test_a_download_that_was_broken_off_is_not_the_model(model: Path) -> None:
    snapshot = fill_cache(model)
    assert model_folder(config(NAME)) == snapshot
    weights = snapshot / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert model_folder(config(NAME)) is None
    assert check_model(config(NAME)).status == "warn"
    weights.unlink()
    assert check_model(config(NAME)).status == "warn"
    weights.write_bytes(whole)
    (snapshot / "config.json").write_text('{"model_type": "mamba"}')
    assert check_model(config(NAME)).status == "fail"  # whole, and of no use


def test_the_cache_is_where_huggingface_hub_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub.cache_folder() == tmp_path / "home" / "hub"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_folder() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == Path("~/.cache/huggingface/hub").expanduser()


def test_the_quickstart_without_its_model_says_how_to_make_it() -> None:
    finding = check_model(resolve_config(None, {}, Path.cwd()))
    assert finding.status == "fail"
    assert "no model folder" in finding.detail
    assert "make demo" in finding.remedy
    assert "trainer init-model" in finding.remedy
