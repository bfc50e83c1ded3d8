"""The assistant's answers in a conversation that a chat template has rendered without marks.

An answer begins where the rendering of the turns before it ends, with the markup that asks for an
answer, and ends with the markup that the template puts after it.

Some templates write another text before an answer that is asked for: Mistral's put the system's
text into the last user's turn. The last answer then continues its prompt. One before it begins
after the markup that ends its prompt; where more than white space and closed reasonings differ, it
is named as changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from trainer.data.answer_start import (
    find_answer_start,
    find_common_prefix,
    find_continued_answer,
    find_end,
    find_moved_start,
    has_same_ending,
    has_same_text,
)
from trainer.data.chat_marks import END_MARK, ConversationError, Span, Turn, insert_end_mark

FIRST = (
    "the conversation begins with the assistant, which the chat template cannot express; leave that"
    " turn out, put a user's before it, or make it context with 'weight' 0"
)
REMEDY = (
    "leave out the turns after it, make it context with 'weight' 0, or mark answers in the template"
    " with {% generation %}"
)
_LAST_REMEDY = REMEDY.partition(", ")[2]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers in a conversation; spans are in characters of the text."""

    text: str
    spans: dict[int, list[Span]]
    joined: bool = False
    """Whether the text is the prompt for the last answer, and that answer."""
    changed: int | None = None
    """The first turn before which the text is another than its prompt."""


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Where an answer begins in a conversation."""

    asked: str
    """The prompt for it."""
    begin: int
    opened: str
    """The end of the prompt that the conversation lacks, such as an opened reasoning."""
    moved: bool = False
    """Whether the conversation has another text before it than the prompt."""

    def split_prompt_and_answer(self, turn: Turn, text: str) -> tuple[str, str | None]:
        """Return the prompt, and the answer to learn if it continues an opened reasoning.

        Args:
            turn: the answer's turn.
            text: the conversation.
        """
        answer = find_continued_answer(turn, self.opened, text[self.begin :])
        if answer is not None:
            return self.asked, answer
        return self.asked[: len(self.asked) - len(self.opened)], None


class AnswerFinder:
    """Finds the answers in one conversation.

    Args:
        render: renders turns, and asks for an answer if its second argument is true.
        turns: the conversation as the template sees it.
        text: its rendering.
        markup: the special tokens that the template itself writes.
        ends: those at which the model stops.
    """

    def __init__(
        self,
        render: Callable[[Sequence[Turn], bool], str],
        turns: list[Turn],
        text: str,
        markup: re.Pattern[str],
        ends: frozenset[str],
    ) -> None:
        self._render, self._turns, self._text = render, turns, text
        self._markup, self._ends = markup, ends

    def find_answers(self, targets: Sequence[int]) -> Answers:
        """Return the answers of these turns.

        Raises:
            ConversationError: they cannot be found.
        """
        text_ends, last = self.find_text_ends(targets), len(self._turns) - 1
        spans: dict[int, list[Span]] = {}
        joined = False
        if last in text_ends:
            place = text_ends[last]
            self._text += self._find_late_end(self._text[place:])
            start = self.find_start(last, text_ends)
            begin, end = start.begin, self._find_answer_end(last, start, place)
            asked, answer = start.split_prompt_and_answer(self._turns[last], self._text)
            joined = start.moved
            if joined or answer is not None:
                answer = self._text[begin:place] if answer is None else answer
                rest = self._text[place : end if joined else None]
                self._text = asked + answer + rest
                begin, end = len(asked), len(asked + answer) + end - place
            if joined:
                text_ends = self.find_text_ends([n for n in targets if n != last], start.asked)
            spans[last] = [(begin, end)]
        changed: list[int] = []
        for number in text_ends:
            if number not in spans:
                start = self.find_start(number, text_ends)
                changed += [number] if start.moved else []
                end = self._find_answer_end(number, start, text_ends[number])
                spans[number] = [(start.begin, end)]
        return Answers(self._text, spans, joined, min(changed, default=None))

    def find_text_ends(self, numbers: Sequence[int], asked: str | None = None) -> dict[int, int]:
        """Return where the last text of each of these turns ends in the rendering.

        Args:
            asked: the prompt for the last turn, if they are sought in that.
        """
        turns = self._turns if asked is None else self._turns[:-1]
        marked = [
            insert_end_mark(turn, n) if n in numbers else turn for n, turn in enumerate(turns)
        ]
        parts = END_MARK.split(self._render(marked, asked is not None))
        texts, marks = parts[::2], parts[1::2]
        if lost := sorted(set(numbers) - set(map(int, marks))):
            raise ConversationError(self._describe_omission(lost[0]))
        if "".join(texts) != (self._text if asked is None else asked):
            raise ConversationError("the chat template changes the assistant's text")
        places: dict[int, list[int]] = {}
        for number, place in zip(map(int, marks), accumulate(map(len, texts)), strict=False):
            places.setdefault(number, []).append(place)
        return {
            number: found[self._count_own_marks(turns, number, len(found)) - 1]
            for number, found in places.items()
        }

    def _describe_omission(self, number: int) -> str:
        """Return why a turn's text is not in the rendering."""
        calls = self._turns[number].get("tool_calls") or [{}]
        name = calls[-1].get("function", calls[-1]).get("name")
        part = f"the call of {name!r} in turn" if name else "the text of turn"
        return (
            f"the chat template omits {part} {number + 1}; make the turn context with 'weight' 0,"
            " or use a template that writes it"
        )

    def _count_own_marks(self, turns: list[Turn], number: int, most: int) -> int:
        """Return how often a template writes a turn's mark in that turn.

        Some write the name of a called tool again, in the turn with its result.
        """
        if most == 1 or number == len(turns) - 1:
            return most
        return min(max(len(END_MARK.findall(self._render_through(number))), 1), most)

    def _render_through(self, number: int) -> str:
        """Return the conversation up to a turn, which is marked."""
        turns = self._turns[:number]
        try:
            return self._render([*turns, insert_end_mark(self._turns[number], number)], False)
        except ConversationError:
            if any(turn["role"] == "user" for turn in turns):
                raise
            raise ConversationError(FIRST) from None

    def find_start(self, number: int, text_ends: dict[int, int]) -> AnswerStart:
        """Return where an answer begins.

        Args:
            said: where the last texts of the answers end.

        Raises:
            ConversationError: its prompt cannot be rendered, or is another text.
        """
        before = self._turns[:number]
        first = all(turn["role"] != "user" for turn in before)
        closing = find_end((before[-1].get("content") or "") if before else "")
        asked = self._render_first_prompt(before, closing) if first else self._render(before, True)
        if asked is not None:
            begin = find_answer_start(asked, self._text)
            if begin is not None and begin <= text_ends[number]:
                return AnswerStart(asked, begin, asked[begin:])
        asking = self._find_generation_prompt(self._turns if asked is None else before)
        asked = asked if asked is not None else asking
        bounds = (
            max((place for n, place in text_ends.items() if n < number), default=0),
            text_ends[number],
        )
        found = find_moved_start(asked, asking, self._text, self._markup, bounds, closing)
        if found is None:
            if first:
                raise ConversationError(FIRST)
            raise ConversationError(self._describe_change(number))
        begin, opened = found
        alike = has_same_text(asked[: len(asked) - len(opened)], self._text[:begin])
        return AnswerStart(asked, begin, opened, not alike and not first)

    def _describe_change(self, number: int) -> str:
        last = number == len(self._turns) - 1
        return f"{changed_text(number)}; {_LAST_REMEDY if last else REMEDY}"

    def _render_first_prompt(self, before: list[Turn], closing: str) -> str | None:
        """Return the prompt for an answer before which no user spoke, None if there is none.

        Most templates want a user's turn, and some write a system's text into that.

        Args:
            closing: what the text of the turn before it ends with.
        """
        with contextlib.suppress(ConversationError):
            asked = self._render(before, True)
            return asked if closing in "".join(asked.split()) else None
        return None

    def _find_generation_prompt(self, turns: list[Turn]) -> str:
        """Return what the template adds to some turns to ask for an answer, if it only adds."""
        with contextlib.suppress(ConversationError):
            asked, whole = self._render(turns, True), self._render(turns, False)
            return asked.removeprefix(whole) if asked.startswith(whole) else ""
        return ""

    def _find_late_end(self, alone: str) -> str:
        """Return the end of the last answer if the template writes it only before another turn.

        GLM's models stop at the token that begins that turn.

        Args:
            alone: what the template puts after the answer.
        """
        if not self._ends or self._markup.search(alone):
            return ""
        *before, last = self._turns
        role = "tool" if last.get("tool_calls") else "user"
        longer = [*before, insert_end_mark(last, 0), {"role": role, "content": "x"}]
        with contextlib.suppress(ConversationError):
            parts = END_MARK.split(self._render(longer, False))
            if end := self._match_stop_token(alone, "".join(parts[2:3])):
                return end[0]
        return ""

    def _match_stop_token(self, alone: str, within: str) -> re.Match[str] | None:
        """Return the token at which the model stops, after an answer to which none belongs.

        Args:
            alone: what the template puts after the answer if that is the last turn.
            within: what follows it before another turn.
        """
        bare = alone.rstrip()
        if self._markup.search(alone) or not within.startswith(bare):
            return None
        found = self._markup.match(within, len(within) - len(within[len(bare) :].lstrip()))
        return found if found is not None and found[0] in self._ends else None

    def _find_answer_end(self, number: int, start: AnswerStart, text_end: int) -> int:
        """Return where an answer ends.

        Args:
            said: where its last text ends.
        """
        within = alone = self._text[text_end:]
        if number < len(self._turns) - 1:
            alone = END_MARK.split(self._render_through(number))[-1]
        if stop := self._match_stop_token(alone, within):
            return text_end + stop.end()
        always = has_same_ending(start.asked, self._text, self._markup) and self._asks_always
        end = self._measure_ending(alone, within, always)
        if end is None:
            end = self._measure_other_ending(self._turns[:number], alone, within)
        if end is None:
            end = self._measure_call_ending(number, alone, within)
        if end is None:
            raise ConversationError(
                f"the chat template ends turn {number + 1} differently if more turns follow;"
                f" {REMEDY}"
            )
        answer = self._text[start.begin : text_end]
        return text_end + self._measure_before_header(
            number, answer, self._text[text_end : text_end + end]
        )

    def _measure_before_header(self, number: int, answer: str, closing: str) -> int:
        """Return how much of what ends an answer is before the header of another turn.

        Command R+'s writes instructions after the last turn, whatever that is.
        """
        tokens = list(self._markup.finditer(closing))
        if len(tokens) > 1 and (
            header := self._markup.match(self._find_generation_prompt(self._turns[:number]))
        ):
            for token in tokens:
                if token[0] == header[0] and header[0] not in answer:
                    return len(closing[: token.start()].rstrip())
        return len(closing)

    @cached_property
    def _asks_always(self) -> bool:
        """Whether the template writes the same, asked for an answer or not."""
        return self._render(self._turns, True) == self._render(self._turns, False)

    def _measure_ending(self, alone: str, within: str, always: bool) -> int | None:
        """Return how much of `within` ends an answer, None if that is unclear.

        Args:
            alone: what the template puts after an answer that is the last turn.
            within: what follows it in the whole conversation.
            always: both go on with the markup that asks for an answer.
        """
        if always and (end := self._markup.search(within)):
            return end.end()
        common = (
            alone if within.startswith(alone) else find_common_prefix(alone, within, self._markup)
        )
        if common != alone:  # some end the last turn with one more token: take the common part
            ends = [match.end() for match in self._markup.finditer(common)]
            if not ends:
                return None
            common = common[: ends[-1]]
        return len(common.rstrip()) or len(common)

    def _measure_other_ending(self, before: list[Turn], alone: str, within: str) -> int | None:
        """Return how much of `within` ends an answer that ends otherwise as the last turn.

        Its end is the token that ends it as the last turn, after other white space, or the token
        that ends the turn before it; gpt-oss ends only the last answer with one of its own.
        """
        common = len(find_common_prefix(alone, within, self._markup))
        rest = within[common:]
        token = self._markup.match(rest.lstrip())
        if token is None:
            return None
        if not alone[common:].lstrip().startswith(token[0]):
            ended = self._render(before, False).rstrip() if before else ""
            if not ended.endswith(token[0]):
                return None
        return within.index(token[0], common) + len(token[0])

    def _measure_call_ending(self, number: int, alone: str, within: str) -> int | None:
        """Return how much of `within` ends a call of which more is written before another turn.

        Apriel's writes the call's id only before its result.
        """
        later = (turn.get("content") or "" for turn in self._turns[number + 1 :])
        token = self._markup.search(within)
        ends = list(self._markup.finditer(alone))
        if not self._turns[number].get("tool_calls") or token is None or not ends:
            return None
        tail = alone[ends[0].start() :].rstrip()
        between = "".join(within[: token.start()].split())
        if not within.startswith(tail, token.start()) or any(
            text.strip() and find_end(text) in between for text in later
        ):
            return None
        return token.start() + len(tail)


def changed_text(number: int) -> str:
    """Return that the text before a turn is another one than its prompt."""
    return (
        f"the chat template changes the text before turn {number + 1} when that turn is to be"
        " generated"
    )
