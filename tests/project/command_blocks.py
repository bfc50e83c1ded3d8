"""The command blocks of the documents: what a reader is told to type.

A block is fenced as `sh` or as nothing, or it is indented by four spaces; it is one of commands
when a line of it begins with one. It either runs in a test, which asks for it by
`command_block(...)`, or says why not in a comment of its own:

    # not run by the tests: two hosts with GPUs
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests import ROOT

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("tests/*/README.md"),
    ]
)

COMMAND = re.compile(
    r"(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) )*"  # its environment
    r"(?:\.venv/bin/)?(?:launch|trainer|torchrun|srun|ansible-playbook|make|git|molecule|pytest|python3?|pip"
    r"|pre-commit|bash|sudo|ssh|scp|rsync|curl|apt|apt-get|\.ci/run)\s"
)
REASON = re.compile(r"^\s*# not run by the tests: (\S.*)$", re.MULTILINE)
FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4}.*\n(?:^\s*\n(?=^ {4}))?)+", re.MULTILINE)


@dataclass(frozen=True)
class CommandBlock:
    """Commands under one heading of a document."""

    document: str
    heading: str
    text: str
    """As a reader copies it: without fence or indentation."""

    @property
    def is_transcript(self) -> bool:
        """Whether it shows what a command prints; typed are the lines that begin with `$ `."""
        return bool(re.search(r"^(?:\$ |==> )", self.text, re.MULTILINE))

    @property
    def commands(self) -> list[str]:
        """Its lines that begin with a command, without continuation lines."""
        lines = (line.strip().removeprefix("$ ") for line in self.text.splitlines())
        return [line for line in lines if COMMAND.match(f"{line} ")]

    @property
    def reason(self) -> str | None:
        """Why no test runs it, in its own words."""
        found = REASON.search(self.text)
        return found[1] if found else None


def command_blocks() -> Iterator[CommandBlock]:
    """Yield every block of commands, transcripts among them, in the order of the documents."""
    for path in DOCUMENTS:
        heading = ""
        text = path.read_text(encoding="utf-8")
        for part in re.split(r"^(?=#{1,6} )", _hide_comments(text), flags=re.MULTILINE):
            if title := re.match(r"#{1,6} (.*)", part):
                heading = title[1].strip("`")
            for block in _blocks(part):
                found = CommandBlock(str(path.relative_to(ROOT)), heading, block)
                if found.commands:
                    yield found


def command_block(document: str, heading: str) -> CommandBlock:
    """Return the one block of commands under a heading that is to be run."""
    (found,) = (
        block
        for block in command_blocks()
        if (block.document, block.heading) == (document, heading)
        and block.reason is None
        and not block.is_transcript
    )
    return found


def _hide_comments(text: str) -> str:
    """Mark comments within fences, so that they are not taken for headings."""
    return FENCED.sub(lambda match: re.sub(r"^#", "\0#", match[0], flags=re.MULTILINE), text)


def _blocks(part: str) -> Iterator[str]:
    for match in FENCED.finditer(part):
        if match["language"] in ("", "sh", "bash", "console"):
            yield match["text"].replace("\0", "")
    for match in INDENTED.finditer(FENCED.sub("", part)):
        yield re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE)
