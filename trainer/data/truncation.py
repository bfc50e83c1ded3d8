"""Long conversations, cut so that the instruction and the answer stay.

The oldest parts are removed first: whole exchanges (a user's turn with everything up to the next
one), up to the last exchange with an answer to learn; then lines of its user's text. If one
paragraph is longer than all others together, such as a transcript between a title and an
instruction, its lines are removed; otherwise lines between the first and the last paragraph. System
turns stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from trainer.data.encoder import IGNORED, Encoder
from trainer.data.shapes import ChatMessage, Sample

_BLANK = "\n\n"


def encode_truncated(encoder: Encoder, sample: Sample, limit: int) -> tuple[list[int], list[int]]:
    """Return ids and labels of a sample, at most `limit`.

    A sample that is no conversation is cut at its end. Of a conversation that does not fit, the
    first token is left, without a target: it counts nothing.

    Raises:
        ConversationError: the chat template cannot express it.
    """
    ids, labels = encoder.encode(sample)
    if len(ids) <= limit or not sample.messages:
        return ids[:limit], labels[:limit]
    fitted = fit_conversation(
        sample, lambda shorter: len(encoder.encode_conversation(shorter)[0]), limit
    )
    return (ids[:1], [IGNORED]) if fitted is None else encoder.encode_conversation(fitted)


def encode_answers(
    encoder: Encoder, sample: Sample, limit: int
) -> list[tuple[list[int], list[int]]]:
    """Return the same of each answer; those of a preference are cut at their ends.

    Both thus keep the same prompt.

    Raises:
        ConversationError: the chat template cannot express one.
    """
    if sample.rejected is None:
        return [encode_truncated(encoder, sample, limit)]
    return [(ids[:limit], labels[:limit]) for ids, labels in map(encoder.encode, sample.answers)]


def fit_conversation(sample: Sample, count: Callable[[Sample], int], limit: int) -> Sample | None:
    """Return a conversation with as little cut as makes it fit; None if nothing does.

    Args:
        count: returns a conversation's tokens.
        limit: the tokens that it may have.
    """
    system, exchanges = _split_exchanges(sample.messages)
    answered = [any(turn.target for turn in exchange) for exchange in exchanges]
    last = len(answered) - 1 - answered[::-1].index(True)
    asked = exchanges[last][0]
    head, lines, tail = _split_lines(asked.content) if asked.role == "user" else ("", [""], "")

    def drop_exchanges(steps: int) -> Sample:
        """Return the conversation without so many exchanges and then lines."""
        dropped = min(steps, last)
        kept = [turn for exchange in exchanges[dropped:] for turn in exchange]
        if steps > last:
            text = head + "\n".join(lines[steps - last :]).lstrip("\n") + tail
            kept[0] = replace(kept[0], content=text)
        return replace(sample, messages=(*system, *kept))

    steps = range(last + len(lines))
    least = bisect_left(steps, True, key=lambda step: count(drop_exchanges(step)) <= limit)
    return drop_exchanges(least) if least < len(steps) else None


def _split_exchanges(
    messages: tuple[ChatMessage, ...],
) -> tuple[list[ChatMessage], list[list[ChatMessage]]]:
    """Return the system turns at the beginning, and the exchanges after them."""
    first = next((n for n, turn in enumerate(messages) if turn.role != "system"), len(messages))
    exchanges: list[list[ChatMessage]] = []
    for turn in messages[first:]:
        begins = turn.role == "user" and exchanges and exchanges[-1][-1].role != "user"
        if begins or not exchanges:
            exchanges.append([])
        exchanges[-1].append(turn)
    return list(messages[:first]), exchanges


def _split_lines(text: str) -> tuple[str, list[str], str]:
    """Return what stays at the start, the lines of which the first ones can go, and the rest."""
    paragraphs = text.split(_BLANK)
    longest = max(range(len(paragraphs)), key=lambda n: len(paragraphs[n]))
    if len(paragraphs) > 2 and len(paragraphs[longest]) * 2 <= len(text):
        begin, end = 1, len(paragraphs) - 1
    else:
        begin, end = longest, longest + 1
    head = "".join(part + _BLANK for part in paragraphs[:begin])
    tail = "".join(_BLANK + part for part in paragraphs[end:])
    return head, _BLANK.join(paragraphs[begin:end]).split("\n"), tail
