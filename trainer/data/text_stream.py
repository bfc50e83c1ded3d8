"""The text of an answer while its tokens come, in pieces that never change again."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
"""Text of bytes that are not yet a character."""


class TextStream:
    """Hands out each part of a text once.

    Tokens are decoded with those before them: a tokenizer in SentencePiece's manner omits the first
    space of what it decodes. So few are decoded at a time that the work grows with their number.

    Args:
        before: tokens that the text goes on from, such as a prompt's. A tokenizer begins a text
            after an added token, so that of them only those behind the last one count.
        markers: texts that end it and are no part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), markers: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self.markers = [marker for marker in markers if marker]
        self.ended = False
        """A marker has come."""
        added = tokenizer.get_added_tokens_decoder()
        begin = next((end for end in range(len(before), 0, -1) if before[end - 1] in added), 0)
        self._read = 0  # tokens so far
        self._pending: list[int] = []  # the last of them, which may be half a character
        self._before, self._text_before = list(before[begin:]), ""
        self._text_before = self._decode(self._before)
        self._kept = ""  # text before the pending tokens' that may be the beginning of a marker
        self._rest = ""  # that text and the pending tokens'
        self._gone = 0  # characters of it that were handed out
        self._pieces: list[str] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Return what is new in the text of all tokens so far, without what may still change."""
        handed = len(self._pieces)
        for token in tokens[self._read :]:
            if self.ended:
                break
            self._add(token)
        self._read = len(tokens)
        return "".join(self._pieces[handed:])

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest of the text of all tokens."""
        new = self.push(tokens)
        if not self.ended:
            new += self._emit_text(len(self._rest))
        return new

    @property
    def text(self) -> str:
        """All that was handed out."""
        return "".join(self._pieces)

    def _add(self, token: int) -> None:
        self._pending.append(token)
        text = self._pending_text()
        self._rest = self._kept + text
        places = [self._rest.find(marker) for marker in self.markers]
        if found := [place for place in places if place >= 0]:
            self.ended = True
            self._emit_text(min(found))
            return
        known = self._rest.rstrip(INCOMPLETE)
        self._emit_text(len(known) - self._count_begun_marker(known))
        if text and not text.endswith(INCOMPLETE):
            self._kept, self._gone = self._rest[self._gone :], 0
            self._rest = self._kept
            self._before, self._pending = self._pending, []
            self._text_before = self._decode(self._before)

    def _pending_text(self) -> str:
        text = self._decode([*self._before, *self._pending])
        if text.startswith(self._text_before):
            return text[len(self._text_before) :]
        # Single bytes: with half a character, a run of them is no text from its beginning.
        return self._decode(self._pending)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _count_begun_marker(self, text: str) -> int:
        """Return how many characters at the end of a text are the beginning of a marker."""
        return max((_count_overlap(text, marker) for marker in self.markers), default=0)

    def _emit_text(self, end: int) -> str:
        """Hand out the rest up to a place."""
        new = self._rest[self._gone : end]
        self._gone += len(new)
        self._pieces.append(new)
        return new


def _count_overlap(text: str, marker: str) -> int:
    sizes = range(min(len(marker), len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
