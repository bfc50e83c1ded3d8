"""One line of a data file as what is learned from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.data.turns import ChatMessage, read_tools, read_turns
from trainer.data.values import BadLineError, read_nonempty_text, read_string

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a data file; `text` is empty for a conversation."""

    text: str
    label: int | None = None
    messages: tuple[ChatMessage, ...] = ()
    prompt: str = ""
    """Precedes `text` and is not learned."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools that a conversation may call."""
    line: int = 0
    """Its line, or its number in a file without lines; counted from 1."""
    source: str = field(default="", compare=False)
    """Prefix of `line` in a message, where that is not `file:`."""
    rejected: Sample | None = None
    """Worse answer of a preference, after the same prompt."""

    @property
    def answers(self) -> tuple[Sample, ...]:
        """Itself, and of a preference the worse answer."""
        return (self,) if self.rejected is None else (self, self.rejected)

    def place(self, path: Path) -> str:
        """Return where it is in data of a path, as `file:line`."""
        return f"{self.source or f'{path}:'}{self.line}"

    def digest(self) -> bytes:
        """Return 32 bytes that identify its text, independent of its label and position."""
        from blake3 import blake3  # of the extras that train

        if self.rejected is not None:
            both = replace(self, rejected=None).digest() + self.rejected.digest()
            return blake3(b"preference\0" + both).digest()
        turns = [
            [
                message.role,
                message.content,
                *([message.more] if message.more else []),
                *([] if message.learned else ["context"]),
            ]
            for message in self.messages
        ]
        if turns:
            tree = [turns, self.tools] if self.tools else turns
            return blake3(b"messages\0" + json.dumps(tree).encode()).digest()
        if self.prompt:
            return blake3(b"prompt\0" + json.dumps([self.prompt, self.text]).encode()).digest()
        return blake3(b"text\0" + self.text.encode()).digest()


def read_completion(tree: Tree, key: str = "completion") -> Sample:
    """Return an answer to a prompt; both are texts, or at least one is turns.

    Raises:
        BadLineError: they are neither.
    """
    prompt, answer = tree.get("prompt"), tree.get(key)
    if not isinstance(prompt, list | dict) and not isinstance(answer, list | dict):
        return Sample(read_nonempty_text(tree, key), prompt=read_string(tree, "prompt"))
    asked = as_context(read_role_turns(tree, "prompt", "user"))
    return build_conversation(tree, (*asked, *read_role_turns(tree, key, "assistant")))


def read_role_turns(tree: Tree, key: str, role: str) -> tuple[ChatMessage, ...]:
    """Return the turns of a key; a text is one turn of the role.

    Raises:
        BadLineError: it is neither.
    """
    if isinstance(tree.get(key), list | dict):
        return read_turns(tree[key], key)
    return (ChatMessage(role, read_nonempty_text(tree, key)),)


def as_context(turns: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return turns that are not learned."""
    return tuple(replace(turn, learned=False) for turn in turns)


def build_conversation(tree: Tree, turns: tuple[ChatMessage, ...]) -> Sample:
    """Return turns as a sample, with `system` and the tools that stand beside them.

    Raises:
        BadLineError: there are two system texts, or the tools are none.
    """
    system = read_string(tree, "system") if "system" in tree else ""
    if system.strip():
        first = turns[0]
        if first.role == "system" and first.content != system:
            raise BadLineError("has two system texts, in 'system' and as a turn; remove one")
        if first.role != "system":
            turns = (ChatMessage("system", system), *turns)
    if tree.get("tools") and tree.get("functions"):
        raise BadLineError("has both 'tools' and 'functions'; remove one")
    tools = read_tools(tree.get("tools"), "tools", wrap="messages" not in tree)
    tools += read_tools(tree.get("functions"), "functions", wrap=True)
    return Sample("", messages=turns, tools=tools)


def check_target(key: str, turns: tuple[ChatMessage, ...]) -> None:
    """Check that turns have something to learn.

    Raises:
        BadLineError: they have not.
    """
    if not any(turn.role == "assistant" for turn in turns):
        raise BadLineError(f"'{key}' has no assistant turn to learn from")
    if not any(turn.target for turn in turns):
        raise BadLineError(f"'{key}' has only turns of weight 0, so nothing is learned from it")
