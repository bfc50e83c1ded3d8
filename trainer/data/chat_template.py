"""A tokenizer's chat template, and the parts of its output that are the assistant's turns.

If a template marks them with `{% generation %}`, the marks decide. Otherwise the conversation is
rendered again in parts: an answer begins where the rendering of the turns before it ends, with
the markup that asks for an answer, and ends with the markup that the template puts after it. If
that does not hold, the conversation is refused: training and prompting would use different texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.tokenizer_folder import MORE_TEMPLATES, TEMPLATE_FILE, TokenizerFolder
from trainer.data.turns import REASONING, ChatMessage
from trainer.system.errors import InputError, plain_reason

Span = tuple[int, int]

# Unicode's noncharacters, for internal use: no text has them.
_FORGED, _FORGED_END, _HERE = "\ufdd0", "\ufdd1", "\ufdd2"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = "leave out the turns after it, or mark answers in the template with {% generation %}"


class ConversationError(InputError):
    """The chat template cannot express a conversation."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text; spans are `begin, end` in characters, in their order."""

    text: str
    learned: list[Span]
    """The assistant's turns, each with the markup that ends it."""
    literal: list[Span]
    """Plain text that looks like a special token."""


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        sources: templates by name: `default`, and some have `tool_use`.
        tokens: the tokenizer's special tokens by their names, such as `eos_token`.
        special: all special tokens.
    """

    def __init__(
        self, sources: dict[str, str], tokens: dict[str, str], special: frozenset[str]
    ) -> None:
        self._sources, self._tokens = sources, tokens
        longest = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> RenderedChat:
        """Return a conversation up to the assistant's next turn; none of it is learned.

        Raises:
            ConversationError: the template cannot express it.
        """
        text = self._render(self._guarded(messages), tools, asking=True)
        return _layout(text, [])

    def lay_out(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> RenderedChat:
        """Return a whole conversation.

        Raises:
            ConversationError: the template cannot express it, or the assistant's turns of it.
        """
        turns = self._guarded(messages)
        text = self._render(turns, tools)
        if _GENERATION.search(self._source(tools)):
            layout = _layout(text, [])
            if not layout.learned:
                raise ConversationError("the chat template marks nothing as generated")
            return layout
        spoken = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        marked = [_marked(turn) if number in spoken else turn for number, turn in enumerate(turns)]
        parts = self._render(marked, tools).split(_HERE)
        if len(parts) != len(spoken) + 1 or "".join(parts) != text:
            raise ConversationError("the chat template omits or changes the assistant's text")
        spans: list[Span] = []
        for count, number in enumerate(spoken, start=1):
            said = len("".join(parts[:count]))
            asked = self._render(turns[:number], tools, asking=True)
            if not text.startswith(asked) or len(asked) > said:
                raise ConversationError(
                    f"the chat template changes the text before turn {number + 1}"
                    f" when that turn is to be generated; {_REMEDY}"
                )
            alone = self._render([*turns[:number], marked[number]], tools)
            end = self._end(alone.rpartition(_HERE)[2], text[said:])
            if end is None:
                raise ConversationError(
                    f"the chat template ends turn {number + 1} differently if more turns follow;"
                    f" {_REMEDY}"
                )
            spans.append((len(asked), said + end))
        return _layout(text, spans)

    def _end(self, alone: str, within: str) -> int | None:
        """Return how much of `within` ends an answer, None if that is unclear.

        Args:
            alone: what the template puts after an answer that is the last turn.
            within: what follows it in the whole conversation.
        """
        pairs = zip(alone, within, strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(within))
        common = alone[:same]
        if common != alone:  # some end the last turn with one more token: take the common part
            ends = [match.end() for match in self._special.finditer(common)]
            if not ends:
                return None
            common = common[: ends[-1]]
        return len(common.rstrip()) or len(common)

    def _source(self, tools: Sequence[dict[str, Any]]) -> str:
        if tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" not in self._sources:
            raise ConversationError("the tokenizer's chat templates have none named 'default'")
        return self._sources["default"]

    def _render(
        self,
        turns: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        *,
        asking: bool = False,
    ) -> str:
        from trainer.data.template_sandbox import compile_template  # only conversations need Jinja

        try:
            return compile_template(self._source(tools))(
                messages=turns,
                tools=self._guard(list(tools)) or None,
                documents=None,
                add_generation_prompt=asking,
                **self._tokens,
            )
        except Exception as error:  # a template may raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConversationError(f"the chat template refuses it: {reason}") from None

    def _guarded(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return the turns as a template sees them, with marks around forged tokens."""
        return [self._guard(_turn(message)) for message in messages]

    def _guard(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._guard(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._guard(each) for each in value]
        if not isinstance(value, str):
            return value
        if found := _RESERVED.search(value):
            raise ConversationError(f"it holds U+{ord(found[0]):04X}, which is not a character")
        return self._special.sub(f"{_FORGED}\\g<0>{_FORGED_END}", value)


def read_chat_template(folder: TokenizerFolder, special: frozenset[str]) -> ChatTemplate | None:
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
    files = {"default": folder.path / TEMPLATE_FILE}
    files |= {path.stem: path for path in (folder.path / MORE_TEMPLATES).glob("*.jinja")}
    found: dict[str, str] = {}
    for name, path in files.items():
        if path.is_file():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: cannot be read: {plain_reason(error)}") from None
    sources = found or sources  # files replace the settings, as in transformers
    return ChatTemplate(sources, folder.names, special) if sources else None


def _turn(message: ChatMessage) -> dict[str, Any]:
    """Return a turn as a template sees it; nulls are left out, as in transformers."""
    content = {} if message.absent else {"content": message.content}
    return {"role": message.role, **content, **_with_reasoning(message.more)}


def _with_reasoning(more: dict[str, Any]) -> dict[str, Any]:
    """Give a turn's reasoning the names that templates read, as transformers does."""
    found = next((more[key] for key in REASONING if key in more), None)
    return more if found is None else {"thinking": found, **more, "reasoning_content": found}


def _marked(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's turn with a mark inside its last text."""
    content: str = turn.get("content", "")
    if content.strip():
        bare = content.rstrip()  # a template may trim
        return {**turn, "content": f"{bare}{_HERE}{content[len(bare) :]}"}
    *calls, last = turn.get("tool_calls") or [{}]
    call = last.get("function", last)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ConversationError("an assistant's turn has neither text nor the name of a tool")
    call = {**call, "name": f"{call['name']}{_HERE}"}
    last = {**last, "function": call} if "function" in last else call
    return {**turn, "tool_calls": [*calls, last]}


def _layout(rendered: str, learned: list[Span]) -> RenderedChat:
    """Remove the marks from a rendering; `learned` counts the characters of `rendered`."""
    from trainer.data.template_sandbox import LEARNED, LEARNED_END

    if not _RESERVED.search(rendered):
        return RenderedChat(rendered, learned, [])
    begins = {_FORGED: _FORGED_END, LEARNED: LEARNED_END}
    text: list[str] = []
    found: dict[str, list[Span]] = {_FORGED_END: [], LEARNED_END: []}
    opened: dict[str, int] = {}
    where: list[int] = []  # each character of `rendered`: its place in the text
    for character in rendered:
        where.append(len(text))
        if character in begins:
            opened[begins[character]] = len(text)
        elif character in found:
            found[character].append((opened.pop(character, len(text)), len(text)))
        else:
            text.append(character)
    where.append(len(text))
    spans = found[LEARNED_END] + [(where[begin], where[end]) for begin, end in learned]
    return RenderedChat("".join(text), spans, found[_FORGED_END])
