"""A tokenizer and its layout of a sample, with the `tokenizers` library alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.config.data import TEMPLATE_DATE, LostText
from trainer.data.chat import chat_format, check_plain, iter_pieces
from trainer.data.chat_marks import ConversationError, RenderedChat, compile_alternatives
from trainer.data.chat_template import read_chat_template
from trainer.data.shapes import Sample
from trainer.data.text_stream import TextStream
from trainer.data.tokenizer_folder import TokenizerFolder
from trainer.data.turns import ChatMessage
from trainer.model.families import text_config
from trainer.model.safetensors_headers import read_object

IGNORED = -100
"""Marks a token without loss, as in torch's cross-entropy."""
_SAMPLE_ANSWER = "Good morning"  # an answer that is no part of any markup
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "it"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at it.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class EncoderSource:
    """The parts that an `Encoder` is made of."""

    tokenizer: str
    """The tokenizer's folder."""
    lost_text: LostText
    today: str
    model: str
    """The model's folder."""

    def open_encoder(self) -> Encoder:
        """Return an encoder of these."""
        return Encoder(Path(self.tokenizer), self.lost_text, self.today, Path(self.model))


class Encoder:
    """A tokenizer with the special ids that the layout of a sample needs.

    Args:
        lost_text, today: see `data.lost_text` and `data.date`.
        model_dir: the model's folder, if the tokenizer lies beside an adapter.
    """

    def __init__(
        self,
        tokenizer_dir: Path,
        lost_text: LostText = "refuse",
        today: str = TEMPLATE_DATE,
        model_dir: Path | None = None,
    ) -> None:
        model_dir = model_dir or tokenizer_dir
        self.source = EncoderSource(str(tokenizer_dir), lost_text, today, str(model_dir))
        folder = TokenizerFolder(tokenizer_dir)
        self.tokenizer = folder.open_tokenizer()
        self.unused = folder.list_unused()
        """Lines that name the files and settings of the tokenizer that are not used."""
        model = read_object(model_dir / "config.json", optional=True)
        known = text_config(model).get("vocab_size")
        self.known = known if isinstance(known, int) else None
        """How many tokens the model has embeddings for; None if unknown."""
        generation = read_object(model_dir / "generation_config.json", optional=True)
        self._ends = _as_ids(model.get("eos_token_id")) + _as_ids(generation.get("eos_token_id"))
        self.end = self._end_of_text(folder.names.get("eos_token"))
        """The token that ends a text."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        stops = (self.end, *self._ends)
        ends = {self.tokenizer.id_to_token(each) for each in stops if each is not None}
        named = frozenset(each for each in ends if each is not None)
        self.template = read_chat_template(folder, special, lost_text, today, named)
        """The publisher's chat template, if the tokenizer has one."""
        self._special = compile_alternatives(special)
        self.format = chat_format(special)
        """The layout without a template."""
        self._markup = lru_cache(64)(self._read_markup)
        """Ids of what a format writes around texts, which is the same in each conversation."""
        self.prefix = self.tokenizer.encode("").ids  # what the tokenizer puts first, such as BOS
        if self.end is not None and self.prefix[-1:] == [self.end]:
            self.prefix = self.prefix[:-1]  # some append the end-of-text token themselves

    @property
    def largest(self) -> int:
        """The largest id that a text can get."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Return ids and unshifted labels of a sample; of a class's text the labels are the ids.

        A learned text ends with the tokenizer's end-of-text token.
        """
        if sample.messages:
            return self.encode_conversation(sample)
        (ids,) = self.encode_texts([sample])
        if sample.label is not None:
            return ids, ids
        if sample.prompt:
            return self._encode_completion(sample)
        ids = self.append_end(ids)
        return ids, ids

    def encode_checked(self, sample: Sample) -> tuple[list[int], list[int], str | None]:
        """Return what `encode` and `check_conversation` return of a sample, laid out once.

        Raises:
            ConversationError: the chat template cannot express it.
        """
        if sample.messages and self.template is not None:
            chat = self.template.render_conversation(sample.messages, sample.tools)
            return *self._tokenise(chat), chat.lost
        return *self.encode(sample), None

    def append_end(self, ids: list[int]) -> list[int]:
        """Return a text's tokens with the end-of-text token, if there is one."""
        return ids if self.end is None or not ids or ids[-1] == self.end else [*ids, self.end]

    def _encode_completion(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Encode the prompt alone, as in generation, and then its completion, which goes on."""
        asked = self.encode_prompt(sample)
        self._continuing.encode_special_tokens = False
        answer = self.append_end(self._continuing.encode(sample.text, add_special_tokens=False).ids)
        return asked + answer, [IGNORED] * len(asked) + answer

    def encode_texts(self, samples: list[Sample]) -> list[list[int]]:
        """Return the ids of each text as `AutoTokenizer` gives them."""
        self.tokenizer.encode_special_tokens = False
        batch = self.tokenizer.encode_batch_fast([sample.text for sample in samples])
        return [encoding.ids for encoding in batch]

    def encode_conversation(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Return ids and labels; plain text cannot forge markup.

        Raises:
            ConversationError: the chat template cannot express it.
        """
        if self.template is not None:
            return self._tokenise(self.template.render_conversation(sample.messages, sample.tools))
        ids, labels = list(self.prefix), [IGNORED] * len(self.prefix)
        check_plain(sample)
        for piece in iter_pieces(sample.messages, self.format):
            part = self._markup(piece.text) if piece.markup else self._encode_plain(piece.text)
            ids += part
            labels += part if piece.target else [IGNORED] * len(part)
        return ids, labels

    def _encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are text."""
        self.tokenizer.encode_special_tokens = True
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _read_markup(self, text: str) -> list[int]:
        self.tokenizer.encode_special_tokens = False
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def check_conversation(self, sample: Sample) -> str | None:
        """Check that a conversation can be laid out, without its tokens.

        Returns:
            The first words that the chat template leaves out, if that is accepted.

        Raises:
            ConversationError: the chat template cannot express it.
        """
        if self.template is not None:
            return self.template.render_conversation(sample.messages, sample.tools).lost
        return check_plain(sample)

    def remark_answers(self, sample: Sample) -> str | None:
        """Return what a sample has in its learned answers that a person has to know.

        That is calls that nothing ends, or the first special token that is encoded as plain text.
        """
        learned = [message for message in sample.messages if message.target]
        if any(message.more.get("tool_calls") for message in learned) and not self._ends_calls:
            return (
                "calls that the chat template does not end, so the model does not learn to stop"
                " after them; write the tokenizer's end token there ({{ eos_token }})"
            )
        markup = self._special if self.template is None else self.template.own_markup
        texts = (message.content for message in learned)
        token = next((found[0] for text in texts if (found := markup.search(text))), None)
        if token is None:
            return None
        return f"the special token {token} in an answer's text, where it is learned as plain text"

    @cached_property
    def ends_answers(self) -> bool:
        """Whether a learned answer of a conversation ends with a token that ends texts."""
        return self._learns_end(ChatMessage("assistant", _SAMPLE_ANSWER))

    @cached_property
    def _ends_calls(self) -> bool:
        return self._learns_end(
            ChatMessage("assistant", "", {"tool_calls": [_CALL]}, absent=True), _TOOL
        )

    def _learns_end(self, answer: ChatMessage, *tools: dict[str, Any]) -> bool:
        sample = Sample("", messages=(ChatMessage("user", "Hello"), answer), tools=tools)
        try:
            _, labels = self.encode_conversation(sample)
        except ConversationError:
            return True  # the template wants other turns
        return bool(self.next_turn) or not self.stops.isdisjoint(labels)

    def _tokenise(self, layout: RenderedChat) -> tuple[list[int], list[int]]:
        """Return ids and labels of a text as transformers gives them.

        If plain text looks like a special token, the text is cut and that part encoded alone.
        """
        learned = bytearray(len(layout.text))
        for begin, end in layout.learned:
            learned[begin:end] = b"\1" * (end - begin)
        ids: list[int] = []
        labels: list[int] = []
        bounds = [0, *(place for span in layout.literal for place in span), len(layout.text)]
        for number, (begin, end) in enumerate(pairwise(bounds)):
            self.tokenizer.encode_special_tokens = number % 2 == 1
            part = self.tokenizer.encode(layout.text[begin:end], add_special_tokens=False)
            ids += part.ids
            labels += [
                token if 1 in learned[begin + first : begin + max(first + 1, last)] else IGNORED
                for token, (first, last) in zip(part.ids, part.offsets, strict=True)
            ]
        return ids, labels

    def encode_prompt(self, sample: Sample) -> list[int]:
        """Return the ids that a model continues: a text, or a conversation without its last answer.

        A conversation ends with the markup that begins an answer; the completion of a line with a
        prompt is left out.
        """
        if not sample.messages:
            (ids,) = self.encode_texts([Sample(sample.prompt or sample.text)])
            return ids[:-1] if ids and ids[-1] == self.end else ids
        if self.template is not None:
            ids, _ = self._tokenise(self.template.render_prompt(sample.messages, sample.tools))
            return ids
        messages = sample.messages
        if messages[-1].role == "assistant":
            messages = messages[:-1]
        ids, _ = self.encode_conversation(replace(sample, messages=messages))
        self.tokenizer.encode_special_tokens = False
        opening = self.format.before.format(role="assistant")
        return ids + self.tokenizer.encode(opening, add_special_tokens=False).ids

    def answer_stream(
        self, sample: Sample, prompt: Sequence[int], markers: Sequence[str] = ()
    ) -> TextStream:
        """Return a stream of the text of an answer to a prompt of `encode_prompt`.

        The text goes on from the prompt's; an answer that is laid out as a text of its own is one.

        Args:
            markers: texts that end it, beside `next_turn`.
        """
        if not sample.messages:
            return TextStream(self.tokenizer, prompt, markers)
        before = () if self.template is None else prompt
        return TextStream(self.tokenizer, before, (self.next_turn, *markers))

    @cached_property
    def _continuing(self) -> Tokenizer:
        return remove_first_space(self.tokenizer)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Tokens that end a text or an answer: the model's, and the one after a template's turn."""
        ends = (self.end, self._end_of_turn(), *self._ends)
        return frozenset(token for token in ends if token is not None)

    @property
    def next_turn(self) -> str:
        """Text that ends an answer, as it begins the next turn; empty if special tokens do."""
        if self.template is not None or self.format.required:
            return ""
        return self.format.end + self.format.before.format(role="user")

    def _end_of_text(self, named: str | None) -> int | None:
        """Return the tokenizer's own end, else the model's: older tokenizers name none."""
        if named is not None:
            return self.tokenizer.token_to_id(named)
        return self._ends[0] if self._ends else None

    def _end_of_turn(self) -> int | None:
        """Return the first special token after an answer's text, None without one."""
        if self.template is None:
            return self.tokenizer.token_to_id(self.format.end) if self.format.required else None
        turns = ChatMessage("user", "Hello"), ChatMessage("assistant", _SAMPLE_ANSWER)
        try:
            text = self.template.render_conversation(turns, []).text
        except ConversationError:
            return None
        self.tokenizer.encode_special_tokens = False
        after = self.tokenizer.encode(
            text.rpartition(_SAMPLE_ANSWER)[2], add_special_tokens=False
        ).ids
        added = self.tokenizer.get_added_tokens_decoder()
        ends = [token for token in after if token in added]
        # A template may end the text itself with markup of its own before the special token.
        return next((token for token in ends if added[token].special), next(iter(ends), None))


def _as_ids(ends: Any) -> list[int]:
    """Return the ids of `eos_token_id`, which is one of them or a list."""
    return [each for each in (ends if isinstance(ends, list) else [ends]) if type(each) is int]


def remove_first_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for texts that go on from another one, which puts no space before them.

    SentencePiece does; it is the same one if that puts none.
    """
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer
    states = [json.loads(part.__getstate__()) if part else None for part in parts]
    changed = [_remove_space(state) for state in states]
    if changed == states:
        return tokenizer
    tree = json.loads(tokenizer.to_str())
    tree["normalizer"], tree["pre_tokenizer"] = changed
    return Tokenizer.from_str(json.dumps(tree))


def _remove_space(step: Any) -> Any:
    """Return a step, or a sequence of steps, that adds no space; None for one that does no more."""
    if step is None or step["type"] == "Prepend":
        return None
    changed = dict(step)
    for steps in ("normalizers", "pretokenizers"):
        if steps in step:
            kept = map(_remove_space, step[steps])
            changed[steps] = [each for each in kept if each is not None]
    if "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    if "prepend_scheme" in step:
        changed["prepend_scheme"] = "never"
    return changed
