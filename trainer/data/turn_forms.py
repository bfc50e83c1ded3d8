"""The forms in which chat templates expect a turn."""

from __future__ import annotations

import json
from typing import Any

from trainer.data.chat_marks import Turn
from trainer.data.turns import REASONING, ChatMessage


def template_turn(message: ChatMessage) -> dict[str, Any]:
    """Return a turn as a template sees it; nulls are left out, as in transformers."""
    content = {} if message.absent else {"content": message.content}
    return {"role": message.role, **content, **_with_reasoning(message.more)}


def _with_reasoning(more: dict[str, Any]) -> dict[str, Any]:
    """Give a turn's reasoning the names that templates read, as transformers does."""
    found = next((more[key] for key in REASONING if key in more), None)
    return more if found is None else {"thinking": found, **more, "reasoning_content": found}


def with_null(turn: Turn) -> Turn:
    """Return a turn whose missing text is null."""
    return {"content": None, **turn}


def with_text(turn: Turn) -> Turn:
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
