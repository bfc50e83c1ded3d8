"""Every block of commands in the documents runs in a test, or says in the block why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from tests.project.command_blocks import (
    COMMAND,
    DOCUMENTS,
    FENCED,
    ROOT,
    CommandBlock,
    command_block,
    command_blocks,
)

BLOCKS = list(command_blocks())
ASKED = re.compile(r'command_block\(\s*"(?P<document>[^"]+)",\s*"(?P<heading>[^"]+)",?\s*\)')
SHELL = re.compile(r"#|export |cd |\. |for |do |done|source |[A-Z_]+=\S*$")
HIDDEN = re.compile(r"#.*(?:launch|trainer|ansible-playbook) [a-z]+ .*(?:--?[a-z]|/)")
FILE = re.compile(
    r"(?<![\w/.-])(?:tests|benchmarks|examples|recipes|playbooks|inventory)/[\w./-]+\.\w+"
)


def asked_for() -> set[tuple[str, str]]:
    """Return the blocks that tests run, by document and heading."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return {(match[1], match[2]) for source in sources for match in ASKED.finditer(source)}


def name(block: CommandBlock) -> str:
    return f"{block.document}, {block.heading}: {block.commands[0]}"


def test_every_block_is_run_or_says_why_not() -> None:
    run = asked_for()
    neither = [
        name(block)
        for block in BLOCKS
        if not block.is_transcript
        and block.reason is None
        and (block.document, block.heading) not in run
    ]
    assert neither == [], "ask for the block in a test, or add `# not run by the tests: WHY` to it"


def test_what_tests_ask_for_is_there() -> None:
    for document, heading in asked_for():
        assert command_block(document, heading).commands


def test_the_files_that_commands_name_are_there() -> None:
    for block in BLOCKS:
        absent = [file for file in FILE.findall(block.text) if not (ROOT / file).exists()]
        assert absent == [], name(block)


def test_each_line_of_a_block_is_a_command_of_its_own() -> None:
    """Lines that were wrapped as text are commands that fail, or comments that hide them."""
    wrong = [
        f"{name(block)}: {line}"
        for block in BLOCKS
        if not block.is_transcript
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
        if line.strip()
        and (HIDDEN.search(line) or not (COMMAND.match(f"{line} ") or SHELL.match(line)))
    ]
    assert not wrong, "\n".join(wrong)


def test_yaml_and_json_in_the_documents_can_be_read() -> None:
    for path in DOCUMENTS:
        for match in FENCED.finditer(path.read_text(encoding="utf-8")):
            if match["language"] in ("yaml", "yml"):
                assert yaml.safe_load(match["text"]) is not None, path
            elif match["language"] == "json":
                assert json.loads(match["text"]) is not None, path


@pytest.mark.parametrize(
    ("script", "words"),
    [("demo.sh", {}), ("demo_distill.sh", {"$out": "demo-distill", "$scheme": "topk"})],
)
def test_a_transcript_shows_what_the_demo_runs(script: str, words: dict[str, str]) -> None:
    text = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    for variable, value in words.items():
        text = text.replace(variable, value)
    folder = "demo-distill" if words else "demo/"
    shown = [
        command
        for block in BLOCKS
        if block.is_transcript and folder in block.text
        for command in block.commands
        if not command.startswith("make ")
    ]
    assert shown
    assert [command for command in shown if f"show {command}" not in text] == []


def test_the_test_beds_own_commands_are_there() -> None:
    shown = {
        command.split()[3]
        for block in BLOCKS
        for command in block.commands
        if command.startswith("python -m tests.testbed ")
    }
    usage = subprocess.run(
        [sys.executable, "-m", "tests.testbed", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "inventory" in shown
    assert [word for word in shown if not re.search(rf"^  {word} ", usage, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("text", "commands", "reason", "transcript"),
    [
        ("```sh\nlaunch status   # now\n```\n", ["launch status   # now"], None, False),
        ("```\n.venv/bin/launch status\n```\n", [".venv/bin/launch status"], None, False),
        ("```python\nlaunch()\n```\n", [], None, False),
        ("Text:\n\n    make test\n\nMore text.\n", ["make test"], None, False),
        ("    launch.py   a file, no command\n", [], None, False),
        (
            "```sh\n# not run by the tests: no GPU\nmake bench\n```\n",
            ["make bench"],
            "no GPU",
            False,
        ),
        ("    $ make demo\n    ==> 1. Data\n", ["make demo"], None, True),
    ],
)
def test_what_a_block_of_commands_is(
    tmp_path, monkeypatch, text: str, commands: list[str], reason: str | None, transcript: bool
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n## Part\n\n{text}", encoding="utf-8")
    monkeypatch.setattr("tests.project.command_blocks.ROOT", tmp_path)
    monkeypatch.setattr("tests.project.command_blocks.DOCUMENTS", [page])
    blocks = list(command_blocks())
    assert [block.commands for block in blocks] == ([commands] if commands else [])
    for block in blocks:
        assert (block.document, block.heading) == ("page.md", "Part")
        assert (block.reason, block.is_transcript) == (reason, transcript)
