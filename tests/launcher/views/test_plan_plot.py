"""`launch plan --plot`: the picture has what the table has, and a mistake is one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launcher.cli import run
from tests import ROOT

RACK = ("plan", "--shape", "7b", "--cluster", "8xA100-80G nvlink, 2 hosts, 200gbit")


def words_of(picture: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]+)</text>", picture.read_text(encoding="utf-8"))


def test_the_picture_in_the_documentation_is_what_the_command_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    assert run([*RACK, "--method", "full", "--plot", str(picture)]) == 0
    words = words_of(picture)
    assert words == words_of(ROOT / "docs/plan.svg")
    table = capsys.readouterr().out
    for title in ("FSDP2 x TP8+SP", "DDP x PP2 zbv", "Motley bf16 QLoRA"):
        assert title in words
        assert title in table
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "buffers"):
        assert part in words
    for schedule in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev"):
        assert any(word.startswith(f"{schedule}, ") for word in words)
    assert {"hours for the tokens", "linear", "backward to weights"} <= set(words)
    assert list(tmp_path.iterdir()) == [picture]


def test_panels_without_figures_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    assert run(["plan", "--shape", "405b", "--cluster", "1xT4", "--plot", str(picture)]) == 4
    words = words_of(picture)
    assert "activations" in words
    assert not {"linear", "backward to weights"} & set(words)
    assert "Nothing fits" in capsys.readouterr().out


def test_matplotlib_is_needed_for_a_picture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["plan", "--shape", "7b", "--cluster", "1xH200"]) == 0
    capsys.readouterr()
    assert run([*RACK, "--plot", str(tmp_path / "plan.svg")]) == 2
    shown = capsys.readouterr()
    assert shown.err == (
        "launch: --plot draws with matplotlib, which is not installed: pip install 'motley[plot]'\n"
    )
    assert (shown.out, list(tmp_path.iterdir())) == ("", [])


@pytest.mark.parametrize(
    ("name", "said"),
    [("plan.png", "the picture is an SVG; name it plan.svg"), ("absent/plan.svg", "no folder")],
)
def test_files_that_cannot_be(
    tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*RACK, "--plot", str(tmp_path / name)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_picture_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.svg").mkdir()
    assert (
        run(["plan", "--shape", "7b", "--cluster", "1xT4", "--plot", f"{tmp_path}/plan.svg"]) == 2
    )
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]
