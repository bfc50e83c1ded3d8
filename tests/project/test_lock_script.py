"""`make lock`, without an index."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

OLD = "# old\ntorch==2.13.0+cpu \\\n    --hash=sha256:1\n"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script, which writes into a folder of the test's."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("TORCH_CPU_INDEX", "https://torch.example/cpu")
    module = importlib.import_module("lock")
    monkeypatch.setattr(module, "LOCKS", tmp_path)
    return module


def test_an_entry_keeps_its_hashes_and_its_reason(lock: ModuleType) -> None:
    two = ["a==1 \\\n    --hash=sha256:1\n    # via b\n", "b==2 ; x \\\n    --hash=sha256:2\n"]
    assert lock.entries("# a comment\n" + "".join(two)) == two


@pytest.mark.parametrize("name", ["torch==2.13.0", "nvidia-nccl-cu13==1", "triton==3", "cuda-x==1"])
def test_what_belongs_to_a_build_of_torch(lock: ModuleType, name: str) -> None:
    assert lock.CUDA.match(name)
    assert not lock.CUDA.match("torchvision==1")


def test_hashes_of_torch_stay_while_its_index_is_away(
    lock: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*_: str, index: str, **__: str) -> str:
        assert index == "https://torch.example/cpu"
        raise SystemExit("lock: uv pip compile: dns error")

    with pytest.raises(SystemExit, match="dns error"):
        lock.lock_cpu_torch(away, "2.13.0")
    (tmp_path / "torch-cpu.txt").write_text(OLD)
    lock.lock_cpu_torch(away, "2.13.0")
    assert (tmp_path / "torch-cpu.txt").read_text() == OLD
    assert "torch-cpu.txt stays as it is" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="dns error"):
        lock.lock_cpu_torch(away, "2.14.0")


def test_hashes_of_torch_come_from_its_index(lock: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "torch-cpu.txt").write_text(OLD)
    new = "torch==2.13.0+cpu \\\n    --hash=sha256:2\n"
    lock.lock_cpu_torch(lambda *_, **__: new, "2.13.0")
    assert (tmp_path / "torch-cpu.txt").read_text() == lock.HEADER + new
