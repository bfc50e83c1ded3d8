"""Generated tables of the documents are as their models are, and describe every setting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from pydantic import Field

from scripts import generated_tables
from tests import ROOT
from trainer.config.run import setting_keys
from trainer.config.section import Section


class Inner(Section):
    deep: bool = False
    """Nested."""


class Example(Section):
    """A section as those of a run config."""

    name: str = Field(min_length=1)
    """A text."""
    rate: float = Field(default=1e-4, gt=0, le=10)
    """The first paragraph | over
    two lines.

    Only for readers of the source.
    """
    size: Annotated[int, Field(ge=1, le=1_000_000_000)] | Literal["auto"] | None = None
    """A size."""
    inner: Inner | None = None
    """Optional."""
    always: Inner = Inner()


class Undescribed(Section):
    name: str = ""


def test_a_row_has_values_default_and_the_first_paragraph() -> None:
    assert list(generated_tables.setting_rows(Example)) == [
        ["`name`", "text", "required", "A text"],
        ["`rate`", "number > 0, ≤ 10", "`0.0001`", "The first paragraph | over two lines"],
        ["`size`", "integer ≥ 1, `auto`", "`null`", "A size"],
        ["`inner`", "a section", "`null`", "Optional"],
        ["`inner.deep`", "`true`, `false`", "`false`", "Nested"],
        ["`always.deep`", "`true`, `false`", "`false`", "Nested"],
    ]


def test_a_setting_without_a_meaning_is_named() -> None:
    with pytest.raises(SystemExit, match=r"Undescribed\.name"):
        list(generated_tables.setting_rows(Undescribed))


def test_the_run_config_has_every_setting() -> None:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert [key for key in setting_keys() if f"| `{key}` |" not in page] == []


def test_options_that_commands_share_are_shown_once() -> None:
    def command(name: str) -> click.Command:
        options = [
            click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
            click.Option(
                [f"--{name}", "-n"], type=int, default=3, show_default=True, help="Count."
            ),
        ]
        return click.Command(
            name, params=[*options, click.Argument(["file"])], help="Do it.\n\nMore."
        )

    group = click.Group("tool", commands=[command(name) for name in ("a", "b", "c")])
    commands = generated_tables.find_commands(group, "tool")
    assert "| `tool a FILE` | Do it |" in generated_tables.describe_commands(commands)
    text = generated_tables.describe_options(commands)
    assert text.count("| `--json` | | Print JSON |") == 1
    assert "### `tool b`\n\n| option | default | meaning |" in text
    assert "| `--b, -n INTEGER` | `3` | Count |\n\nShared: `--json`." in text


def test_a_shared_option_is_the_most_common_of_its_name() -> None:
    def command(name: str, text: str) -> click.Command:
        return click.Command(name, params=[click.Option(["--data"], help=text)])

    meanings = {"a": "A corpus.", "b": "A corpus.", "c": "A file.", "d": "A file.", "e": "A file."}
    group = click.Group("tool", commands=[command(*each) for each in meanings.items()])
    text = generated_tables.describe_options(generated_tables.find_commands(group, "tool"))
    assert (text.count("| A file |"), text.count("| A corpus |")) == (1, 2)
    assert text.count("Shared: `--data`.") == 3


@pytest.mark.parametrize("text", [None, "", "The output."])
def test_an_option_whose_help_is_its_name_is_named(text: str | None) -> None:
    command = click.Command("tool", params=[click.Option(["-o", "--output"], help=text)])
    with pytest.raises(SystemExit, match=r"tool -o, --output: has no help"):
        list(generated_tables.option_rows(command, click.Context(command)))


def test_tables_are_as_generated() -> None:
    done = subprocess.run(
        (sys.executable, "scripts/generated_tables.py", "--check"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_table_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "config.md"
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    page.write_text(text.replace("| `name` | text |", "| `name` | number |"), encoding="utf-8")
    monkeypatch.setattr(generated_tables, "DOCS", tmp_path)
    assert generated_tables.main(["--check"]) == 1
    assert f"{page}: out of date" in capsys.readouterr().err
    assert generated_tables.main([]) == 0
    assert page.read_text(encoding="utf-8") == text
