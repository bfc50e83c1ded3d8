"""Every command, option and make target that the documents show exists."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from tests.project.command_blocks import DOCUMENTS, ROOT, command_blocks

# A command in a code span or at the start of a line of a code block, with its lower-case words.
COMMAND = re.compile(
    r"(?:`|^\s*(?:\$ )?)(?:\.venv/bin/)?(?P<words>(?:launch|trainer)(?: [a-z][a-z-]+)*)"
    r"(?P<rest>[^`\n|]*)",
    re.MULTILINE,
)
TARGET = re.compile(r"(?:`|^\s*(?:\$ )?)make (?P<target>[a-z-]+)", re.MULTILINE)


def documented() -> dict[str, set[str]]:
    """Return the documented commands, each with the options it is shown with."""
    found: dict[str, set[str]] = {}
    shown = [block.text.replace("\\\n", " ") for block in command_blocks()]
    for text in [*shown, *(_spans(file.read_text(encoding="utf-8")) for file in DOCUMENTS)]:
        for match in COMMAND.finditer(text):
            options = re.findall(r"(?<!\S)--[a-z][a-z-]+", match["rest"])
            if " " in match["words"] or options:
                found.setdefault(match["words"], set()).update(options)
    return found


def _spans(text: str) -> str:
    """Return a document's code spans, one a line."""
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"`[^`\n]+`", rest))


COMMANDS = documented()


@pytest.mark.parametrize("words", sorted(COMMANDS))
def test_documented_commands_exist(words: str) -> None:
    from launcher.cli import cli
    from trainer.cli import trainer

    name, *arguments = words.split()
    program = {"launch": cli, "trainer": trainer}[name]
    result = CliRunner().invoke(program, [*arguments, "--help"], prog_name=name)
    assert result.exit_code == 0, result.output
    missing = [option for option in COMMANDS[words] if option not in result.output]
    assert not missing, f"{words} has no {', '.join(missing)}"


def test_the_reference_names_every_command_schema_and_variable() -> None:
    import click

    from launcher.cli import cli
    from launcher.inventory.variables import VARIABLES
    from trainer.cli import trainer

    def visit(group: click.Group, path: str) -> list[str]:
        found: list[str] = []
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            inner = isinstance(command, click.Group)
            found += visit(command, f"{path} {name}") if inner else [f"{path} {name}"]
        return found

    page = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("commands.md", "checks.md", "json.md")
    )
    sources = [
        *(ROOT / "launcher").glob("commands/*.py"),
        *(ROOT / "trainer").glob("commands/**/*.py"),
    ]
    names = (
        "cli",
        "views/logs",
        "plan/plan",
        "views/log_printer",
        "views/render",
        "views/planning",
        "views/discovery",
        "views/dashboard/state",
    )
    sources += [ROOT / "launcher" / f"{name}.py" for name in names]
    names = (
        *("evaluate/scoring", "tracking/status", "evaluate/generation"),
        *("distill/teacher/audit", "evaluate/results"),
    )
    sources += [ROOT / "trainer" / f"{name}.py" for name in names]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    schemas = set(re.findall(r'"(motley\.[a-z.]+/\d+)"', text))
    assert "motley.status/2" in schemas
    words = [*visit(cli, "launch"), *visit(trainer, "trainer"), *schemas, *VARIABLES]
    missing = [word for word in words if not re.search(rf"`{re.escape(word)}\b", page)]
    assert not missing


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [block.text for block in command_blocks()]
    texts += [_spans(file.read_text(encoding="utf-8")) for file in DOCUMENTS]
    shown = {match["target"] for text in texts for match in TARGET.finditer(text)}
    assert shown
    assert shown <= targets


def test_makefile_scripts_exist() -> None:
    scripts = re.findall(r"scripts/\w+\.sh", (ROOT / "Makefile").read_text())
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "command", ["launch cluster up", "trainer finetune", "trainer init-model", "trainer evaluate"]
)
def test_options_of_data_name_no_single_format(command: str) -> None:
    """Data may be of any format; the problems of code tasks are JSON Lines."""
    from launcher.cli import cli
    from trainer.cli import trainer

    name, *arguments = command.split()
    program = {"launch": cli, "trainer": trainer}[name]
    shown = CliRunner().invoke(program, [*arguments, "--help"], prog_name=name).output
    assert "JSON Lines" not in shown.replace("JSON Lines: prompt", "")
