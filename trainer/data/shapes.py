"""The allowed JSON objects of a line, and the samples that they become.

- `classify`: `{input, label}`
- `causal-lm`: one of `SHAPES`; an object of none or of two of them is refused, since only a part of
  it would be trained on
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from trainer.config.run import Task
from trainer.data.values import BadLineError, kind_of, string_of, text_of

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

SHAPES = {
    "text": ("text",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "input": ("input",),
}
"""The keys that each shape of a `causal-lm` line must have."""
_SPELLED = (
    "{text}, {messages}, {conversations}, {prompt, completion}, {instruction, input, output} with"
    " or without input, {input, label}"
)
KEYS = frozenset(key for keys in SHAPES.values() for key in keys)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    """Empty if there is none, as in a turn that only calls tools."""
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keys, such as `tool_calls`, for a chat template."""


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
    """Its line, counted from 1."""

    def digest(self) -> bytes:
        """Return 32 bytes that identify its text, independent of its label and position."""
        turns = [
            [message.role, message.content, *([message.more] if message.more else [])]
            for message in self.messages
        ]
        if turns:
            tree = [turns, self.tools] if self.tools else turns
            return blake3(b"messages\0" + json.dumps(tree).encode()).digest()
        if self.prompt:
            return blake3(b"prompt\0" + json.dumps([self.prompt, self.text]).encode()).digest()
        return blake3(b"text\0" + self.text.encode()).digest()


def parse_sample(tree: Any, number: int, task: Task, num_classes: int | None) -> Sample:
    """Return the JSON value of line `number` as a sample.

    Raises:
        BadLineError: it is not a sample.
    """
    if not isinstance(tree, dict):
        raise BadLineError(f"expected an object, got {kind_of(tree)}")
    if task == "classify":
        assert num_classes is not None
        text = text_of(tree, "input")
        return Sample(text, _label(tree, num_classes), line=number)
    match _shape(tree):
        case "messages":
            tools = _tools(tree.get("tools"))
            return Sample("", messages=_messages(tree["messages"]), tools=tools, line=number)
        case "conversations":
            return Sample("", messages=_conversations(tree["conversations"]), line=number)
        case "instruction":
            asked = text_of(tree, "instruction")
            if tree.get("input") is not None and (given := string_of(tree, "input")).strip():
                asked = f"{asked}\n\n{given}"
            turns = ChatMessage("user", asked), ChatMessage("assistant", text_of(tree, "output"))
            return Sample("", messages=turns, line=number)
        case "prompt":
            completion = text_of(tree, "completion")
            return Sample(completion, prompt=string_of(tree, "prompt"), line=number)
        case shape:
            return Sample(text_of(tree, shape), line=number)


def _shape(tree: dict[str, Any]) -> str:
    """Return the shape of an object.

    Keys of other shapes are allowed only beside a conversation, which is complete.
    """
    shapes = [name for name, keys in SHAPES.items() if tree.keys() >= set(keys)]
    if "instruction" in shapes and "input" in shapes:
        shapes.remove("input")  # part of an instruction
    found = sorted(KEYS & tree.keys())
    if len(shapes) == 1:
        (shape,) = shapes
        own = {*SHAPES[shape], *(("input",) if shape == "instruction" else ())}
        if shape in ("messages", "conversations") or own.issuperset(found):
            return shape
    given = ", ".join(f"'{key[:40]}'" for key in found or [*tree][:5]) or "none"
    wrong = "are of several shapes" if len(shapes) > 1 else "are no known shape"
    raise BadLineError(
        f"its keys ({given}) {wrong}; rename or remove keys until they are one of: {_SPELLED}"
    )


def _label(tree: dict[str, Any], num_classes: int) -> int:
    if "label" not in tree:
        raise BadLineError("lacks the key 'label'")
    label = tree["label"]
    if type(label) is not int:  # bool is an int in Python
        raise BadLineError(f"'label' must be an integer, got {kind_of(label)}")
    if not 0 <= label < num_classes:
        raise BadLineError(f"'label' must be from 0 to {num_classes - 1}, got {label}")
    return label


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    roles = {role: role for role in ROLES}
    return _turns(value, "messages", "role", "content", roles)


def _conversations(value: Any) -> tuple[ChatMessage, ...]:
    """Read ShareGPT's turns; some such data has the usual ones."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return _turns(value, "conversations", "role", "content", {role: role for role in ROLES})
    return _turns(value, "conversations", "from", "value", SHAREGPT_ROLES)


def _turns(
    value: Any, key: str, speaker: str, said: str, roles: dict[str, str]
) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise BadLineError(f"'{key}' must be a non-empty list")
    messages: list[ChatMessage] = []
    for index, turn in enumerate(value):
        where = f"'{key}[{index}]'"
        if not isinstance(turn, dict):
            raise BadLineError(f"{where} must be an object, got {kind_of(turn)}")
        more = {key: value for key, value in turn.items() if key not in (speaker, said)}
        try:
            role = string_of(turn, speaker)
            calls = more.get("tool_calls") or None
            if calls is not None and not _are_objects(calls):
                raise BadLineError("'tool_calls' must be a list of objects")
            silent = calls is not None and turn.get(said) is None
            content = "" if silent else string_of(turn, said)
        except BadLineError as error:
            raise BadLineError(f"{where}: {error}") from None
        if role not in roles:
            raise BadLineError(
                f"{where}: {speaker} must be one of {', '.join(roles)}, got {role[:40]!r}"
            )
        more = {key: value for key, value in more.items() if value is not None}
        messages.append(ChatMessage(roles[role], content, more))
    if all(message.role != "assistant" for message in messages):
        raise BadLineError(f"'{key}' has no assistant turn to learn from")
    return tuple(messages)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Read the tools of a conversation; some data has them as JSON in a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadLineError("'tools' is a string that is not JSON") from None
    if value is not None and not _are_objects(value):
        raise BadLineError("'tools' must be a list of objects")
    return tuple(value or ())


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)
