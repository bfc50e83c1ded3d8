"""docs/planning.md shows what the rules and the command give."""

from __future__ import annotations

import shlex

import pytest

from launcher.cli import run
from tests import ROOT
from tests.project.command_blocks import CommandBlock, command_block


@pytest.mark.parametrize(
    "block",
    [
        command_block("docs/planning.md", "A worked example"),
        command_block("docs/larger-models.md", "See what fits"),
    ],
    ids=lambda block: block.heading,
)
def test_the_worked_examples(capsys: pytest.CaptureFixture[str], block: CommandBlock) -> None:
    (command,) = block.commands
    assert run(shlex.split(command)[1:]) == 0
    assert (
        f"```text\n{capsys.readouterr().out.rstrip()}\n```" in (ROOT / block.document).read_text()
    )
