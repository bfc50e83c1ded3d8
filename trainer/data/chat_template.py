"""A tokenizer's chat template, and the parts of its output that are the assistant's turns.

If a template marks them with `{% generation %}`, the marks decide. Otherwise the conversation is
rendered again in parts: an answer begins where the rendering of the turns before it ends, with
the markup that asks for an answer, and ends with the markup that the template puts after it. If
that does not hold, the conversation is refused: training and prompting would use different texts.

Some templates ask with an opened reasoning, `<think>`, that is not in their conversations. An
answer then begins where prompt and conversation part. If the last answer has a reasoning, which
such a template cuts, it continues the prompt instead, as the model does.

What a template leaves out of an answer, of the other turns or of the tools is refused, or accepted
with `data.lost_text`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from trainer.config.data import TEMPLATE_DATE, LostText
from trainer.data.answer_start import answer_start, common_start, continued_answer, ends_alike
from trainer.data.chat_marks import (
    END_MARK,
    FORGED,
    RESERVED,
    SEEN,
    ConversationError,
    RenderedChat,
    Span,
    Turn,
    any_of,
    generated_spans,
    guarded,
    layout,
    with_end_mark,
    with_mark,
)
from trainer.data.lost_text import beginning, lost_text
from trainer.data.tokenizer_folder import NAMES, TokenizerFolder
from trainer.data.turn_forms import template_turn, with_null, with_text, writes_python
from trainer.data.turns import ChatMessage
from trainer.model.formats import template_files
from trainer.system.errors import InputError, first_line, plain_reason
from trainer.system.regular_file import read_text

Tools = Sequence[dict[str, Any]]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = (
    "leave out the turns after it, make it context with 'weight' 0, or mark answers in the template"
    " with {% generation %}"
)
_FIRST = (
    "the conversation begins with the assistant, which the chat template cannot express; leave that"
    " turn out, put a user's before it, or make it context with 'weight' 0"
)


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        sources: templates by name: `default`, and some have `tool_use`.
        tokens: the tokenizer's special tokens by their names, such as `eos_token`.
        special: all special tokens.
        on_lost: what to do about text that the template leaves out.
        today: the date that it gets if it asks.
    """

    def __init__(
        self,
        sources: dict[str, str],
        tokens: dict[str, str],
        special: frozenset[str],
        on_lost: LostText = "refuse",
        today: str = TEMPLATE_DATE,
    ) -> None:
        self._sources, self._tokens, self._on_lost = sources, tokens, on_lost
        self._today = today
        self._special = any_of(special)
        self._always: dict[str, bool] = {}
        self._markup = re.compile(f"(?<!{FORGED})(?:{self._special.pattern})")

    @property
    def date(self) -> str | None:
        """The date that the template gets; None if it does not ask for one."""
        asks = any("strftime_now" in source for source in self._sources.values())
        return self._today if asks else None

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> RenderedChat:
        """Return a conversation up to the assistant's next turn; none of it is learned.

        An answer at its end is left out; the prompt is then what precedes it in training.

        Raises:
            ConversationError: the template cannot express it.
        """
        if messages[-1].role != "assistant":
            return layout(self._rendered(messages, tools, asking=True)[0], [])
        asked, _ = self._rendered(messages[:-1], tools, asking=True)
        try:
            text, turns = self._rendered(messages, tools)
        except ConversationError:  # the prompt does not need the answer
            return layout(asked, [])
        begin = answer_start(asked, text)
        if begin is not None and continued_answer(turns[-1], asked[begin:], text[begin:]) is None:
            asked = asked[:begin]
        return layout(asked, [])

    def lay_out(self, messages: Sequence[ChatMessage], tools: Tools) -> RenderedChat:
        """Return a whole conversation.

        Raises:
            ConversationError: the template cannot express it, or the assistant's turns of it.
        """
        text, turns = self._rendered(messages, tools)
        marks = _GENERATION.search(self._source(tools)) is not None
        spoken = [n for n, each in enumerate(messages) if each.role == "assistant"]
        targets = [number for number in spoken if messages[number].learned]
        said = self._said(turns, tools, text, spoken if marks else targets)
        if marks:
            spans = generated_spans(text, said, targets)
        else:
            spans: dict[int, list[Span]] = {}
            for number, place in said.items():
                asked = self._ask(turns[:number], tools)
                begin, end = self._span(turns, tools, text, number, asked, place)
                answer = continued_answer(turns[number], asked[begin:], text[begin:])
                if answer is not None and number == len(turns) - 1:
                    text = asked + answer + text[place:]
                    begin, end = len(asked), len(asked + answer) + end - place
                spans[number] = [(begin, end)]
        lost = self._lost(messages, turns, tools, text, spans)
        if lost is not None and self._on_lost == "refuse":
            raise ConversationError(
                f"the chat template leaves out {lost}; change the line, make the turn context with"
                " 'weight' 0, or set data.lost_text: accept to use the rest (without a run:"
                " --lost-text accept)"
            )
        learned = sorted(span for number in targets for span in spans.get(number, ()))
        return replace(layout(text, learned), lost=lost)

    def _said(
        self, turns: list[Turn], tools: Tools, text: str, numbers: Sequence[int]
    ) -> dict[int, int]:
        """Return where the last text of each of these turns ends in the rendering."""
        marked = [with_end_mark(turn, n) if n in numbers else turn for n, turn in enumerate(turns)]
        parts = END_MARK.split(self._render(marked, tools))
        texts, marks = parts[::2], parts[1::2]
        if set(map(int, marks)) != set(numbers) or "".join(texts) != text:
            raise ConversationError("the chat template omits or changes the assistant's text")
        places: dict[int, list[int]] = {}
        for number, place in zip(map(int, marks), accumulate(map(len, texts)), strict=False):
            places.setdefault(number, []).append(place)
        return {
            number: found[self._own_marks(turns, tools, number, len(found)) - 1]
            for number, found in places.items()
        }

    def _own_marks(self, turns: list[Turn], tools: Tools, number: int, most: int) -> int:
        """Return how often a template writes a turn's mark in that turn.

        Some write the name of a called tool again, in the turn with its result.
        """
        if most == 1 or number == len(turns) - 1:
            return most
        only = self._render([*turns[:number], with_end_mark(turns[number], number)], tools)
        return min(max(len(END_MARK.findall(only)), 1), most)

    def _span(
        self, turns: list[Turn], tools: Tools, text: str, number: int, asked: str, said: int
    ) -> Span:
        """Return where an answer begins and ends, in characters of the rendering.

        Args:
            asked: the prompt for it.
            said: where its last text ends.
        """
        begin = answer_start(asked, text)
        if begin is None or begin > said:
            if all(turn["role"] != "user" for turn in turns[:number]):
                raise ConversationError(_FIRST)
            raise ConversationError(
                f"the chat template changes the text before turn {number + 1}"
                f" when that turn is to be generated; {_REMEDY}"
            )
        within = alone = text[said:]
        if number < len(turns) - 1:
            only = self._render([*turns[:number], with_end_mark(turns[number], number)], tools)
            alone = END_MARK.split(only)[-1]
        always = ends_alike(asked, text, self._markup) and self._asks_always(turns, tools, text)
        end = self._end(alone, within, always)
        if end is None:
            end = self._other_end(turns[:number], tools, alone, within)
        if end is None:
            raise ConversationError(
                f"the chat template ends turn {number + 1} differently if more turns follow;"
                f" {_REMEDY}"
            )
        return begin, said + end

    def _asks_always(self, turns: list[Turn], tools: Tools, text: str) -> bool:
        """Return whether the template writes the same, asked for an answer or not."""
        source = self._source(tools)
        if source not in self._always:
            self._always[source] = self._render(turns, tools, asking=True) == text
        return self._always[source]

    def _ask(self, turns: list[Turn], tools: Tools) -> str:
        """Return the prompt after these turns."""
        try:
            return self._render(turns, tools, asking=True)
        except ConversationError:
            if any(turn["role"] == "user" for turn in turns):
                raise
            raise ConversationError(_FIRST) from None

    def _end(self, alone: str, within: str, always: bool) -> int | None:
        """Return how much of `within` ends an answer, None if that is unclear.

        Args:
            alone: what the template puts after an answer that is the last turn.
            within: what follows it in the whole conversation.
            always: both go on with the markup that asks for an answer.
        """
        if always and (end := self._markup.search(within)):
            return end.end()
        common = alone if within.startswith(alone) else common_start(alone, within, self._markup)
        if common != alone:  # some end the last turn with one more token: take the common part
            ends = [match.end() for match in self._markup.finditer(common)]
            if not ends:
                return None
            common = common[: ends[-1]]
        return len(common.rstrip()) or len(common)

    def _other_end(self, before: list[Turn], tools: Tools, alone: str, within: str) -> int | None:
        """Return how much of `within` ends an answer that ends otherwise as the last turn.

        Its end is the token that ends it as the last turn, after other white space, or the token
        that ends the turn before it; gpt-oss ends only the last answer with one of its own.
        """
        common = len(common_start(alone, within, self._markup))
        rest = within[common:]
        token = self._markup.match(rest.lstrip())
        if token is None:
            return None
        if not alone[common:].lstrip().startswith(token[0]):
            ended = self._render(before, tools).rstrip() if before else ""
            if not ended.endswith(token[0]):
                return None
        return within.index(token[0], common) + len(token[0])

    def _lost(
        self,
        messages: Sequence[ChatMessage],
        turns: list[Turn],
        tools: Tools,
        text: str,
        spans: dict[int, list[Span]],
    ) -> str | None:
        """Return the first part of a conversation that its rendering lacks."""
        for number, found in spans.items():
            learned = "".join(text[begin:end] for begin, end in found)
            if messages[number].target and (
                words := lost_text(messages[number], RESERVED.sub("", learned))
            ):
                return f"a part of turn {number + 1}, {words!r}"
        for tool in tools:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and name not in text:
                return f"the tool {name!r}"
        heard = [
            number
            for number, turn in enumerate(turns)
            if turn["role"] != "assistant" and str(turn.get("content", "")).strip()
        ]
        if self._seen(turns, tools, heard) < len(heard):
            for number in heard:
                if not self._seen(turns, tools, [number]):
                    return f"turn {number + 1}, {beginning(messages[number].content)!r}"
        return None

    def _seen(self, turns: list[Turn], tools: Tools, numbers: Sequence[int]) -> int:
        """Return how many of these turns' texts are in the rendering."""
        marked = [with_mark(turn) if n in numbers else turn for n, turn in enumerate(turns)]
        return self._render(marked, tools).count(SEEN)

    def _rendered(
        self, messages: Sequence[ChatMessage], tools: Tools, *, asking: bool = False
    ) -> tuple[str, list[Turn]]:
        """Return a rendering and the turns that it is made of.

        Some templates write the arguments of calls as they are: these get them as JSON text. Some
        want a `content` that is null in a turn without a text.
        """
        turns = self._guarded(messages)
        textual = [with_text(turn) for turn in turns]
        try:
            text = self._render(turns, tools, asking=asking)
            if not any(writes_python(turn, text) for turn in turns):
                return text, turns
            return self._render(textual, tools, asking=asking), textual
        except ConversationError as error:
            null, textual_null = ([with_null(turn) for turn in each] for each in (turns, textual))
            for other in (textual, null, textual_null):
                with contextlib.suppress(ConversationError):
                    if other != turns:
                        return self._render(other, tools, asking=asking), other
            first = next((turn for turn in turns if turn["role"] != "system"), None)
            if not turns or (first is not None and first["role"] == "assistant"):
                raise ConversationError(f"{_FIRST} ({error})") from None
            raise

    def _source(self, tools: Tools) -> str:
        if tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" not in self._sources:
            raise ConversationError("the tokenizer's chat templates have none named 'default'")
        return self._sources["default"]

    def _render(
        self,
        turns: Sequence[Turn],
        tools: Tools,
        *,
        asking: bool = False,
    ) -> str:
        from trainer.data.template_sandbox import compile_template  # only conversations need Jinja

        try:
            return compile_template(self._source(tools), self._today)(
                messages=turns,
                tools=guarded(list(tools), self._special) or None,
                documents=None,
                add_generation_prompt=asking,
                **self._tokens,
            )
        except Exception as error:  # a template may raise anything
            refusal = f"the chat template refuses it: {first_line(error)}"
            raise ConversationError(refusal) from None

    def _guarded(self, messages: Sequence[ChatMessage]) -> list[Turn]:
        """Return the turns as a template sees them, with marks around forged tokens.

        An assistant may write special tokens, such as one that begins a call, but those of turns.
        """
        return [
            guarded(
                template_turn(message),
                self.own_markup if message.role == "assistant" else self._special,
            )
            for message in messages
        ]

    @cached_property
    def own_markup(self) -> re.Pattern[str]:
        """The special tokens that begin and end turns and texts; all if that is unclear.

        They stay plain text in the assistant's turns, too.
        """
        texts: list[str] = []
        for first in ("system", "user"):
            roles = (first, *(("user",) if first == "system" else ()), "assistant", "user")
            with contextlib.suppress(ConversationError):
                texts.append(self._render([{"role": role, "content": "x"} for role in roles], []))
        if not texts:
            return self._special
        own = {self._tokens[name] for name in NAMES if name in self._tokens}
        own.update(*(self._special.findall(text) for text in texts))
        return any_of(own)


def read_chat_template(
    folder: TokenizerFolder, special: frozenset[str], on_lost: LostText, today: str
) -> ChatTemplate | None:
    """Return the chat template of a tokenizer's folder, None if it has none.

    Raises:
        InputError: a file cannot be read.
    """
    named = folder.settings.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(named, str):
        sources["default"] = named
    elif isinstance(named, list):  # some have another one for tools
        sources = {each["name"]: each["template"] for each in named}
    found: dict[str, str] = {}
    for name, file in template_files(folder.path).items():
        path = folder.path / file
        try:
            found[name] = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {plain_reason(error)}") from None
    sources = found or sources  # files replace the settings, as in transformers
    return ChatTemplate(sources, folder.names, special, on_lost, today) if sources else None
