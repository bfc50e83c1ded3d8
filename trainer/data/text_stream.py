"""The text of a sample while its tokens come, in pieces that never change again."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # what bytes decode to that are not yet a character


class TextStream:
    """Hands out each part of a text once.

    Args:
        marker: text that ends the sample and is no part of it; empty for none.
    """

    def __init__(self, tokenizer: Tokenizer, marker: str = "") -> None:
        self._tokenizer, self._marker = tokenizer, marker
        self._handed = ""
        self.ended = False
        """The marker has come."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return what is new in the text of all tokens so far, without what may still change."""
        text, self.ended = self._text(tokens)
        text = text.rstrip(_INCOMPLETE)
        if not self.ended:
            text = text[: len(text) - self._begun(text)]
        return self._hand(text)

    def finish(self, tokens: Sequence[int]) -> str:
        """Return the rest of the text of all tokens."""
        text, self.ended = self._text(tokens)
        return self._hand(text)

    @property
    def text(self) -> str:
        """All that was handed out."""
        return self._handed

    def _text(self, tokens: Sequence[int]) -> tuple[str, bool]:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        if not self._marker:
            return text, False
        before, marker, _ = text.partition(self._marker)
        return before, bool(marker)

    def _begun(self, text: str) -> int:
        """Return how many characters at the end of a text are the beginning of the marker."""
        sizes = range(min(len(self._marker), len(text)), 0, -1)
        return next((size for size in sizes if text.endswith(self._marker[:size])), 0)

    def _hand(self, text: str) -> str:
        new = text[len(self._handed) :]
        self._handed += new
        return new
