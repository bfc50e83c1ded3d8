"""docs/planning.md shows what the rules, the diagrams and the command give."""

from __future__ import annotations

import shlex

import pytest

from launcher.cli import run
from tests import ROOT
from tests.project.command_blocks import command_block
from trainer.planning.decision import diagram

STRATEGIES = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/planning.md").read_text(encoding="utf-8")


def test_the_decision_tree_is_drawn_from_the_rules_that_decide() -> None:
    assert f"```mermaid\n{diagram()}```" in PAGE


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = command_block("docs/planning.md", "A worked example").commands
    assert run(shlex.split(command)[1:]) == 0
    assert f"```text\n{capsys.readouterr().out.rstrip()}\n```" in PAGE


def test_a_block_under_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    command = "launch plan --shape qwen3-0.6b --cluster 2xRTX4090 --diagram tp"
    assert run(shlex.split(command)[1:]) == 0
    assert f"`{command}`:\n\n```mermaid\n{capsys.readouterr().out}```" in STRATEGIES
