"""A tokenizer's chat template, and the parts of its output that are the assistant's turns.

If a template marks them with `{% generation %}`, the marks decide. Otherwise the conversation is
rendered again in parts, by which the answers are found (`answer_finder`). If an answer's prompt
is another text than the conversation, that is refused, or accepted with `data.lost_text`: training
and prompting would use different texts.

Some templates ask with an opened reasoning, `<think>`, that is not in their conversations. An
answer then begins where prompt and conversation part. If the last answer has a reasoning, which
such a template cuts, it continues the prompt instead, as the model does.

What a template leaves out of an answer, of the other turns or of the tools is refused, or accepted
with `data.lost_text`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from trainer.config.data import TEMPLATE_DATE, LostText
from trainer.data.answer_finder import (
    FIRST,
    REMEDY,
    AnswerFinder,
    Answers,
    AnswerStart,
    changed_text,
)
from trainer.data.answer_start import find_answer_start
from trainer.data.chat_marks import (
    FORGED,
    RESERVED,
    SEEN,
    ConversationError,
    RenderedChat,
    Turn,
    compile_alternatives,
    find_generated_spans,
    insert_mark,
    mark_special_tokens,
    strip_marks,
)
from trainer.data.tokenizer_folder import NAMES, TokenizerFolder
from trainer.data.turn_forms import (
    find_forms,
    null_missing_text,
    stringify_arguments,
    to_template_turn,
    writes_python,
)
from trainer.data.turns import REASONING, ChatMessage
from trainer.model.formats import template_files
from trainer.system.errors import InputError, first_line, plain_reason
from trainer.system.regular_file import read_text

Tools = Sequence[dict[str, Any]]

SHOWN_CHARACTERS = 60

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TAGS = re.compile(r"</?(?:think|thinking|reasoning)>|\[/?THINK\]")


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        sources: templates by name: `default`, and some have `tool_use`.
        tokens: the tokenizer's special tokens by their names, such as `eos_token`.
        special: all special tokens.
        on_lost: what to do about text that the template leaves out.
        today: the date that it gets if it asks.
        ends: special tokens at which the model stops.
    """

    def __init__(
        self,
        sources: dict[str, str],
        tokens: dict[str, str],
        special: frozenset[str],
        on_lost: LostText = "refuse",
        today: str = TEMPLATE_DATE,
        ends: frozenset[str] = frozenset(),
    ) -> None:
        self._sources, self._tokens, self._on_lost = sources, tokens, on_lost
        self._forms: dict[str, list[Callable[[Turn], Turn]]] = {}
        self._today, self._ends = today, ends
        self._special = compile_alternatives(special)
        self._markup = re.compile(f"(?<!{FORGED})(?:{self._special.pattern})")

    @property
    def date(self) -> str | None:
        """The date that the template gets; None if it does not ask for one."""
        asks = any("strftime_now" in source for source in self._sources.values())
        return self._today if asks else None

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> RenderedChat:
        """Return a conversation up to the assistant's next turn; none of it is learned.

        An answer at its end is left out; the prompt is then what precedes it in training.

        Raises:
            ConversationError: the template cannot express it.
        """
        if messages[-1].role != "assistant":
            return strip_marks(self._render_turns(messages, tools, asking=True)[0], [])
        asked, _ = self._render_turns(messages[:-1], tools, asking=True)
        try:
            text, turns = self._render_turns(messages, tools)
        except ConversationError:  # the prompt does not need the answer
            return strip_marks(asked, [])
        finder, last = self._create_finder(turns, tools, text), len(turns) - 1
        with contextlib.suppress(ConversationError):
            begin = find_answer_start(asked, text)
            if begin is None:
                start = finder.find_start(last, finder.find_text_ends([last]))
            else:
                start = AnswerStart(asked, begin, asked[begin:])
            asked, _ = start.split_prompt_and_answer(turns[last], text)
        return strip_marks(asked, [])

    def render_conversation(self, messages: Sequence[ChatMessage], tools: Tools) -> RenderedChat:
        """Return a whole conversation.

        Raises:
            ConversationError: the template cannot express it, or the assistant's turns of it.
        """
        text, turns = self._render_turns(messages, tools)
        finder = self._create_finder(turns, tools, text)
        assistant_turns = [n for n, each in enumerate(messages) if each.role == "assistant"]
        targets = [number for number in assistant_turns if messages[number].learned]
        if _GENERATION.search(self._select_source(tools)):
            found = Answers(
                text, find_generated_spans(text, finder.find_text_ends(assistant_turns), targets)
            )
        else:
            found = finder.find_answers(targets)
        if found.changed is not None and self._on_lost == "refuse":
            raise ConversationError(
                f"{changed_text(found.changed)}; {REMEDY}, or set data.lost_text: accept to learn"
                " it after the text that it has there (without a run: --lost-text accept)"
            )
        lost = self._find_lost_text(messages, turns, tools, found)
        if lost is not None and self._on_lost == "refuse":
            raise ConversationError(
                f"the chat template leaves out {lost}; change the line, make the turn context with"
                " 'weight' 0, or set data.lost_text: accept to use the rest (without a run:"
                " --lost-text accept)"
            )
        if lost is None and found.changed is not None:
            lost = f"the text before turn {found.changed + 1}"
        learned = sorted(span for number in targets for span in found.spans.get(number, ()))
        return replace(strip_marks(found.text, learned), lost=lost)

    def _create_finder(self, turns: list[Turn], tools: Tools, text: str) -> AnswerFinder:
        def render(turns: Sequence[Turn], asking: bool) -> str:
            return self._render(turns, tools, asking=asking)

        return AnswerFinder(render, turns, text, self._markup, self._ends)

    def _find_lost_text(
        self, messages: Sequence[ChatMessage], turns: list[Turn], tools: Tools, answers: Answers
    ) -> str | None:
        """Return the first part of a conversation that its rendering lacks."""
        text = answers.text
        for number, found in answers.spans.items():
            learned = "".join(text[begin:end] for begin, end in found)
            if messages[number].target and (
                words := find_lost_text(messages[number], RESERVED.sub("", learned))
            ):
                return f"a part of turn {number + 1}, {words!r}"
        for tool in tools:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and name not in text:
                return f"the tool {name!r}"
        other_turns = [
            number
            for number, turn in enumerate(turns)
            if turn["role"] != "assistant" and str(turn.get("content", "")).strip()
        ]
        asking = answers.joined
        read = turns[:-1] if asking else turns
        if self._count_rendered(read, tools, other_turns, asking) < len(other_turns):
            for number in other_turns:
                if not self._count_rendered(read, tools, [number], asking):
                    return f"turn {number + 1}, {shorten_text(messages[number].content)!r}"
        return None

    def _count_rendered(
        self, turns: list[Turn], tools: Tools, numbers: Sequence[int], asking: bool
    ) -> int:
        """Return how many of these turns' texts are in the rendering."""
        marked = [insert_mark(turn) if n in numbers else turn for n, turn in enumerate(turns)]
        return self._render(marked, tools, asking=asking).count(SEEN)

    def _render_turns(
        self, messages: Sequence[ChatMessage], tools: Tools, *, asking: bool = False
    ) -> tuple[str, list[Turn]]:
        """Return a rendering and the turns that it is made of.

        Some templates write the arguments of calls as they are: these get them as JSON text. Some
        want a `content` that is null in a turn without a text.
        """
        turns = self._mark_turns(messages)
        textual = [stringify_arguments(turn) for turn in turns]
        try:
            text = self._render(turns, tools, asking=asking)
            if not any(writes_python(turn, text) for turn in turns):
                return text, turns
            return self._render(textual, tools, asking=asking), textual
        except ConversationError as error:
            null, textual_null = (
                [null_missing_text(turn) for turn in each] for each in (turns, textual)
            )
            for other in (textual, null, textual_null):
                with contextlib.suppress(ConversationError):
                    if other != turns:
                        return self._render(other, tools, asking=asking), other
            first = next((turn for turn in turns if turn["role"] != "system"), None)
            if not turns or (first is not None and first["role"] == "assistant"):
                raise ConversationError(f"{FIRST} ({error})") from None
            raise

    def _select_source(self, tools: Tools) -> str:
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
        source = self._select_source(tools)
        own = mark_special_tokens(list(tools), self._special) or None
        if source not in self._forms:
            self._forms[source] = []  # while the forms are tried
            self._forms[source] = find_forms(lambda each: self._render(each, tools))
        for form in self._forms[source]:
            turns = [form(turn) for turn in turns]
        return self._render_as_given(source, turns, own, asking)

    def _render_as_given(self, source: str, turns: Sequence[Turn], tools: Any, asking: bool) -> str:
        from trainer.data.template_sandbox import compile_template  # only conversations need Jinja

        try:
            return compile_template(source, self._today)(
                messages=turns,
                tools=tools,
                documents=None,
                add_generation_prompt=asking,
                **self._tokens,
            )
        except Exception as error:  # a template may raise anything
            refusal = f"the chat template refuses it: {first_line(error)}"
            raise ConversationError(refusal) from None

    def _mark_turns(self, messages: Sequence[ChatMessage]) -> list[Turn]:
        """Return the turns as a template sees them, with marks around forged tokens.

        An assistant may write special tokens, such as one that begins a call, but those of turns.
        """
        return [
            mark_special_tokens(
                to_template_turn(message),
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
        return compile_alternatives(own)


def read_chat_template(
    folder: TokenizerFolder,
    special: frozenset[str],
    on_lost: LostText,
    today: str,
    ends: frozenset[str],
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
    if not sources:
        return None
    return ChatTemplate(sources, folder.names, special, on_lost, today, ends & special)


def find_lost_text(message: ChatMessage, rendered: str) -> str | None:
    """Return the beginning of what a template left out of a turn that is learned; None: nothing.

    White space does not count, since templates trim it, and neither do the tags of a reasoning in
    the text, which some templates replace by their own markup.

    Args:
        message: an assistant's turn.
        rendered: the part of the rendering that is learned for it.
    """
    rest = _remove_whitespace(rendered)
    # Each piece is taken out once it is found; the longest first, as it is in no other.
    for forms in sorted(_iter_text_forms(message), key=lambda forms: -len(forms[0])):
        bare = next((form for form in map(_remove_whitespace, forms) if form in rest), None)
        if bare is None:
            return shorten_text(forms[0])
        rest = rest.replace(bare, "\0", 1)
    return None


def shorten_text(text: str) -> str:
    """Return the first words of a text, in one line."""
    words = " ".join(text.split())
    return words if len(words) <= SHOWN_CHARACTERS else f"{words[:SHOWN_CHARACTERS]}..."


def _iter_text_forms(message: ChatMessage) -> Iterator[list[str]]:
    """Yield the texts of a turn, each in the forms in which a template may write it."""
    yield from ([part] for part in _TAGS.split(message.content) if part.strip())
    found = next((message.more[key] for key in REASONING if key in message.more), "")
    yield from ([part] for part in _TAGS.split(found) if part.strip())
    for each in message.more.get("tool_calls", ()):
        function = each.get("function", each)
        if isinstance(name := function.get("name"), str):
            yield [name]
        for leaf in _iter_leaves(function.get("arguments")):
            yield _list_forms(leaf)


def _iter_leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and values of arguments."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _iter_leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _iter_leaves(each)
    elif value is not None and value != "":
        yield value


def _list_forms(leaf: Any) -> list[str]:
    """Return a leaf as text, and as JSON and Python write it."""
    written = {json.dumps(leaf, ensure_ascii=False), json.dumps(leaf), repr(leaf)}
    quoted = isinstance(leaf, str)
    return [str(leaf), *(form[1:-1] if quoted else form for form in written)]


def _remove_whitespace(text: str) -> str:
    return "".join(text.split())
