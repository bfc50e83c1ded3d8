"""The forms in which chat templates expect a turn."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from trainer.data.chat_marks import SEEN, ConversationError, Turn
from trainer.data.turns import REASONING, ChatMessage


def to_template_turn(message: ChatMessage) -> dict[str, Any]:
    """Return a turn as a template sees it; nulls are left out, as in transformers."""
    content = {} if message.absent else {"content": message.content}
    return {"role": message.role, **content, **_add_reasoning_names(message.more)}


def _add_reasoning_names(more: dict[str, Any]) -> dict[str, Any]:
    """Give a turn's reasoning the names that templates read, as transformers does."""
    found = next((more[key] for key in REASONING if key in more), None)
    return more if found is None else {"thinking": found, **more, "reasoning_content": found}


def find_forms(render: Callable[[list[Turn]], str]) -> list[Callable[[Turn], Turn]]:
    """Return the changes to each turn without which a template leaves out texts or calls.

    Args:
        render: renders turns with the template, or raises a ConversationError.
    """

    def is_rendered(*turns: Turn) -> bool:
        with contextlib.suppress(ConversationError):
            return SEEN in render(list(turns))
        return False

    asked: Turn = {"role": "user", "content": SEEN}
    forms: list[Callable[[Turn], Turn]] = []
    if not is_rendered(asked) and is_rendered(split_into_parts(asked)):
        forms.append(split_into_parts)
    for arguments in ({}, "{}"):
        function = {"name": SEEN, "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        turn: Turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        other = {"role": "user", "content": "x"}
        if not is_rendered(other, turn) and is_rendered(other, null_empty_text(turn)):
            return [*forms, null_empty_text]
    return forms


def split_into_parts(turn: Turn) -> Turn:
    """Return a turn whose text is a list of parts, as templates for images want it."""
    if not isinstance(text := turn.get("content"), str):
        return turn
    return {**turn, "content": [{"type": "text", "text": text}]}


def null_empty_text(turn: Turn) -> Turn:
    """Return a turn whose empty text is null if it has calls: some write them only then."""
    if not turn.get("tool_calls") or (turn.get("content") or "").strip():
        return turn
    return {**turn, "content": None}


def null_missing_text(turn: Turn) -> Turn:
    """Return a turn whose missing text is null."""
    return {"content": None, **turn}


def stringify_arguments(turn: Turn) -> Turn:
    """Return a turn whose calls have their arguments as JSON text."""
    if not turn.get("tool_calls"):
        return turn
    calls: list[Any] = []
    for each in turn["tool_calls"]:
        call = each.get("function", each)
        if isinstance(arguments := call.get("arguments"), dict):
            call = {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({**each, "function": call} if "function" in each else call)
    return {**turn, "tool_calls": calls}


def writes_python(turn: Turn, text: str) -> bool:
    """Return whether a template has written the arguments of a call as Python, not as JSON."""
    calls = [each.get("function", each) for each in turn.get("tool_calls", ())]
    found = [call["arguments"] for call in calls if call.get("arguments")]
    return any(
        str(each) in text and json.dumps(each, ensure_ascii=False) not in text
        for each in found
        if isinstance(each, dict)
    )
