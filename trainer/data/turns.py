"""The turns of a conversation, in the forms in which conversations are published.

- OpenAI's `role` and `content`, with `tool_calls`, `weight`, and the older `function_call` and role
  `function`
- ShareGPT's `from` and `value`, with LLaMA-Factory's `function_call` and `observation`
- the flags `train`, `training` (axolotl) and `loss` (ms-swift) of turns that are learned or not
- `reasoning_content`, or `thinking` or `reasoning`, as transformers reads them
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.data.values import (
    BadLineError,
    check_unicode,
    decode_json,
    describe_type,
    format_value,
    read_objects,
    read_string,
)
from trainer.system.key_table import KeyTable

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system",  # OpenAI's name for it
    "function": "tool",
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
FLAGS = ("weight", "train", "training", "loss")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning; the first that is there counts, as in transformers."""

_AS_TEXT = re.compile(r"""\s*(\[\s*)?\{\s*["'](role|content|from|value)["']\s*:""")
"""A text that begins like turns, in JSON or as Python prints them."""
_NO_MEDIA = "is not text, and only text is learned; remove it, or the line"
TURN_KEYS = KeyTable(
    "a turn",
    used=frozenset(
        ("role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id")
    )
    | {"name", *FLAGS, *REASONING},
    harmless=frozenset(("id", "timestamp", "created_at", "model")),
    refused={
        "train_detail": "marks parts of a turn, only whole turns can be context; split the turn",
        "loss_scale": "scales a turn's loss, a turn counts fully or not; use 'weight' 0 or 1",
        "refusal": "is an answer of its own kind, which no template writes; move it to 'content'",
        **dict.fromkeys(("audio", "image", "images", "videos", "audios"), _NO_MEDIA),
    },
    fate="that only some chat templates use",
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    """Empty if there is none, as in a turn that only calls tools."""
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keys, such as `tool_calls`, for a chat template."""
    learned: bool = True
    """Whether an assistant's turn is a target; otherwise it is context."""
    absent: bool = False
    """Whether the data has no text for it (null): a template then sees no `content`."""

    @property
    def target(self) -> bool:
        """Whether the turn is learned."""
        return self.learned and self.role == "assistant"


def decode_turns(value: Any, key: str) -> Any:
    """Return the turns that a text is in JSON, as in a table's cell; any other value as it is.

    Raises:
        BadLineError: a text begins like turns and is not JSON.
    """
    if not isinstance(value, str) or not _AS_TEXT.match(value):
        return value
    tree = decode_json(value, key)
    turns = tree if isinstance(tree, list) else [tree]
    return tree if all(_has_speaker(turn) for turn in turns) else value


def _has_speaker(turn: Any) -> bool:
    if not isinstance(turn, dict):
        return False
    speaker = turn.get("role", turn.get("from"))
    return isinstance(speaker, str) and speaker in ROLES | SHAREGPT_ROLES


def read_messages(value: Any, key: str) -> tuple[ChatMessage, ...]:
    """Return the turns of `messages`.

    Raises:
        BadLineError: they are not turns.
    """
    return _read_turn_list(value, key, "role", "content", ROLES)


def read_conversations(value: Any, key: str) -> tuple[ChatMessage, ...]:
    """Return ShareGPT's turns; some such data has the usual ones.

    Raises:
        BadLineError: they are not turns.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        return read_messages(value, key)
    return _read_turn_list(value, key, "from", "value", SHAREGPT_ROLES)


def read_turns(value: Any, key: str) -> tuple[ChatMessage, ...]:
    """Return turns of either form, by the keys of the first; an object alone is one turn.

    Raises:
        BadLineError: they are not turns.
    """
    turns = [value] if isinstance(value, dict) else value
    first = turns[0] if isinstance(turns, list) and turns else None
    is_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return (read_conversations if is_sharegpt else read_messages)(turns, key)


def read_tools(value: Any, key: str, *, wrap: bool) -> tuple[dict[str, Any], ...]:
    """Return the JSON schemas of a conversation's tools.

    Args:
        wrap: make a tool of a function alone, as OpenAI's older `functions` and ShareGPT's have it.

    Raises:
        BadLineError: they are no list of objects.
    """
    found = read_objects(value, key)
    for each in found:
        if not isinstance(each.get("function", each), dict):
            raise BadLineError(f"'{key}' has a 'function' that is not an object")
    check_unicode(found, f"'{key}'")
    if wrap:
        found = [
            each if "function" in each or "name" not in each else _wrap_function(each)
            for each in found
        ]
    return tuple(found)


def make_call(name: str, arguments: Any) -> dict[str, Any]:
    """Return a call as chat templates expect it."""
    return _wrap_function({"name": name, "arguments": arguments})


def _wrap_function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _read_turn_list(
    value: Any, key: str, role_key: str, text_key: str, roles: Mapping[str, str]
) -> tuple[ChatMessage, ...]:
    if isinstance(value, str):
        value = decode_json(value, key)
    if not isinstance(value, list) or not value:
        raise BadLineError(f"'{key}' must be a non-empty list")
    messages: list[ChatMessage] = []
    for index, turn in enumerate(value):
        try:
            if not isinstance(turn, dict):
                raise BadLineError(f"must be an object, got {describe_type(turn)}")
            messages.append(_read_turn(turn, role_key, text_key, roles))
        except BadLineError as error:
            separator = " " if str(error).startswith("must") else ": "
            raise BadLineError(f"'{key}[{index}]'{separator}{error}") from None
    return tuple(messages)


def _read_turn(
    turn: dict[str, Any], role_key: str, text_key: str, roles: Mapping[str, str]
) -> ChatMessage:
    given = read_string(turn, role_key)
    if given not in roles:
        raise BadLineError(f"{role_key} must be one of {', '.join(roles)}, got {given[:40]!r}")
    role = roles[given]
    # As in transformers, null is a missing key.
    more = {key: each for key, each in turn.items() if key != role_key and each is not None}
    if refusal := TURN_KEYS.explain_refusal(key for key in more if more[key] not in ("", [], {})):
        raise BadLineError(refusal)
    for key in TURN_KEYS.refused:
        more.pop(key, None)
    learned = _take_flags(more, role)
    if given == "function_call":
        more["tool_calls"] = _parse_call_text(read_string(more, text_key))
        more.pop(text_key)
    _read_calls(more)
    if others := {key: more[key] for key in more if key != text_key}:
        check_unicode(others, "a key of the turn")
    for key in REASONING:
        if key in more:
            read_string(more, key)
    if isinstance(more.get(text_key), list):
        more[text_key] = _join_parts(more[text_key])
    if role == "assistant" and text_key not in more and {"tool_calls", *REASONING} & more.keys():
        # LLaMA-Factory's call has an empty text, a null stays a missing key.
        return ChatMessage(role, "", more, learned, absent=given != "function_call")
    content = read_string(turn | more, text_key)
    return ChatMessage(role, content, {k: v for k, v in more.items() if k != text_key}, learned)


def _take_flags(more: dict[str, Any], role: str) -> bool:
    """Take the flags out of a turn's keys; return whether it is learned."""
    values = {key: more.pop(key) for key in FLAGS if key in more}
    for key, value in values.items():
        if value not in (0, 1):
            allowed = "0 or 1" if key == "weight" else "true or false"
            raise BadLineError(f"'{key}' must be {allowed}, got {format_value(value)}")
        if value and role != "assistant":
            raise BadLineError(
                f"'{key}' requests to learn a turn of {role}, but only the assistant's are "
                "learned; remove it"
            )
    return all(values.values())


def _read_calls(more: dict[str, Any]) -> None:
    """Bring the calls of a turn into the form that templates expect: arguments are objects."""
    calls = read_objects(more.pop("tool_calls", None), "tool_calls")
    if "function_call" in more:
        older = more.pop("function_call")
        if not isinstance(older, dict):
            raise BadLineError(f"'function_call' must be an object, got {describe_type(older)}")
        if calls:
            raise BadLineError("has both 'function_call' and 'tool_calls'; remove one")
        calls = [_wrap_function(older)]
    if calls:
        more["tool_calls"] = [_with_object(each) for each in calls]


def _with_object(each: dict[str, Any]) -> dict[str, Any]:
    function = each.get("function", each)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLineError("a call must have a function with a 'name'")
    if not isinstance(function.get("arguments"), str):
        return each
    given = function["arguments"]
    try:
        function = {**function, "arguments": json.loads(given) if given.strip() else {}}
    except (ValueError, RecursionError):
        raise BadLineError(
            f"a call's 'arguments' are text that is not JSON: {format_value(given)}"
        ) from None
    return {**each, "function": function} if "function" in each else function


def _parse_call_text(value: str) -> list[dict[str, Any]]:
    """Return the calls of LLaMA-Factory's turn `function_call`: one as JSON, or a list of them."""
    problem = '\'value\' of function_call must be JSON of a call: {"name": ..., "arguments": ...}'
    try:
        tree: Any = json.loads(value)
    except (ValueError, RecursionError):
        raise BadLineError(problem) from None
    calls: list[Any] = tree if isinstance(tree, list) else [tree]
    if not calls or not all(isinstance(each, dict) and "name" in each for each in calls):
        raise BadLineError(problem)
    return [make_call(each["name"], each.get("arguments", {})) for each in calls]


def _join_parts(parts: list[Any]) -> str:
    """Return the text of a content of parts, put together as templates that take parts do."""
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise BadLineError(
                f"a part of its content must be an object, got {describe_type(part)}"
            )
        sort = part.get("type", "text")
        if sort != "text":
            raise BadLineError(
                f"a part of its content is {format_value(sort)}, only text is learned; remove the"
                " part, or the line"
            )
        texts.append(read_string(part, "text"))
    return "".join(texts)
