"""Glaive's function calls: a conversation as one text, with calls and their responses in it.

    USER: ...


    ASSISTANT: <functioncall> {"name": "weather", "arguments": '{"city": "Bonn"}'} <|endoftext|>


    FUNCTION RESPONSE: ...

The system text ends with the functions, each a JSON object.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trainer.data.turns import ChatMessage, make_call
from trainer.data.values import BadLineError, format_value

_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_TURN = re.compile(rf"^({'|'.join(_ROLES)}):[ \t]?", re.MULTILINE)
_END = "<|endoftext|>"
_CALL = "<functioncall>"
# The arguments are JSON in single quotes, which JSON does not have.
_QUOTED = re.compile(r"""\{\s*"name":\s*"([^"]+)",\s*"arguments":\s*'(.*)'\s*\}""", re.DOTALL)


def read_chat(chat: str) -> tuple[ChatMessage, ...]:
    """Return the turns of a `chat`.

    Raises:
        BadLineError: it does not begin with a turn, or a call is not one.
    """
    marks = list(_TURN.finditer(chat))
    if not marks or chat[: marks[0].start()].strip():
        raise BadLineError("'chat' must begin with 'USER: '")
    ends = [*(mark.start() for mark in marks[1:]), len(chat)]
    turns = [
        _parse_turn(_ROLES[mark[1]], chat[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]
    return tuple(turns)


def read_system(system: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the system text without its functions, and these as tools.

    Text after the functions makes all of it text: nothing of it is left out.
    """
    text = system.removeprefix("SYSTEM:").strip()
    begin = text.find("{")
    if begin < 0:
        return text, ()
    tools: list[dict[str, Any]] = []
    rest, decoder = text[begin:], json.JSONDecoder()
    while rest:
        try:
            function, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, ()
        tools.append({"type": "function", "function": function})
        rest = rest[end:].lstrip()
    return text[:begin].rstrip(), tuple(tools)


def _parse_turn(role: str, text: str) -> ChatMessage:
    if role == "assistant":
        text = text.removesuffix(_END).rstrip()
        if _CALL in text:
            before, _, called = text.partition(_CALL)
            return ChatMessage(role, before.strip(), {"tool_calls": [_parse_call(called.strip())]})
    return ChatMessage(role, text)


def _parse_call(text: str) -> dict[str, Any]:
    try:
        if quoted := _QUOTED.fullmatch(text):
            return make_call(quoted[1], json.loads(quoted[2].replace("\\'", "'")))
        tree = json.loads(text)
        return make_call(tree["name"], tree.get("arguments", {}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadLineError(f"'chat' has a call that cannot be read: {format_value(text)}") from None
