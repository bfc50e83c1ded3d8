"""Conversations of all kinds, drawn from a seed: systems, tools, calls, reasoning, empty texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Turn = dict[str, Any]

WORDS = (
    *(
        "yes",
        "No.",
        "größe",
        "a < b",
        "{x}",
        "if (a) {\n    b();\n}",
        "東京",
        "1,000",
        "\n\n",
        "x ",
    ),
    *("\t", "'quoted'", '"double"', "🙂", "&amp;", "end.", "<b>", "\\n", "  ", "I think so"),
)


def tool(name: str) -> dict[str, Any]:
    """Return the schema of a tool."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "Says it.", "parameters": parameters},
    }


def conversations(
    seed: int,
    count: int,
    *,
    systems: bool = True,
    tools: bool = True,
    reasoning: bool = True,
    weights: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield lines of `messages`, some with `tools`; the last turn is the assistant's and learned.

    Args:
        systems: some begin with a system turn.
        tools: some turns call a tool, with and without a text; its answer follows.
        reasoning: some answers have a `reasoning_content`.
        weights: some answers have a `weight` of 0 or 1.
    """
    source = random.Random(seed)

    def text(*, empty: bool = False) -> str:
        if empty and source.random() < 0.4:
            return ""
        said = "".join(source.choices(WORDS, k=source.randint(1, 6)))
        return said if said.strip() else f"{said}word"

    def answer(**more: Any) -> Turn:
        turn: Turn = {"role": "assistant", **({"content": text()} | more)}
        if reasoning and source.random() < 0.3:
            turn["reasoning_content"] = text()
        if weights and source.random() < 0.3:
            turn["weight"] = source.choice((0, 1))
        return turn

    def calls() -> Iterator[Turn]:
        arguments = {"city": text(), "days": source.randint(0, 9), "deep": {"x": [text(), None]}}
        made = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name in source.choices(("weather", "clock"), k=source.randint(1, 2))
        ]
        yield answer(content=text(empty=True), tool_calls=made)
        for each in made:
            yield {"role": "tool", "name": each["function"]["name"], "content": text()}

    for _ in range(count):
        turns: list[Turn] = []
        calling = tools and source.random() < 0.5
        if systems and source.random() < 0.5:
            turns.append({"role": "system", "content": text()})
        for _ in range(source.randint(1, 3)):
            turns.append({"role": "user", "content": text()})
            if calling and source.random() < 0.6:
                turns += calls()
            turns.append(answer())
        turns[-1].pop("weight", None)
        line: dict[str, Any] = {"messages": turns}
        if calling:
            line["tools"] = [tool("weather"), tool("clock")]
        yield line
