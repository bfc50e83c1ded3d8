"""Instructions of Alpaca's kind: a text, what it is about, and earlier rounds."""

from __future__ import annotations

from trainer.data.sample import Tree
from trainer.data.turns import ChatMessage
from trainer.data.values import BadLineError, decode_json, read_nonempty_text, read_string


def read_instruction(tree: Tree, given: str) -> tuple[ChatMessage, ...]:
    """Return the turns of an instruction, with what it is about in the key `given`.

    Raises:
        BadLineError: it is no text, or the history is no rounds.
    """
    asked = read_nonempty_text(tree, "instruction")
    if given in tree and (about := read_string(tree, given)).strip():
        asked = f"{asked}\n\n{about}"
    return *_read_history(tree), ChatMessage("user", asked)


def _read_history(tree: Tree) -> list[ChatMessage]:
    """Read the earlier rounds, each a pair of a question and its answer."""
    rounds = tree.get("history", [])
    if isinstance(rounds, str):
        rounds = decode_json(rounds, "history")
    turns: list[ChatMessage] = []
    for each in rounds if isinstance(rounds, list) else [None]:
        if not isinstance(each, list) or len(each) != 2:
            raise BadLineError("'history' must be a list of pairs: [[question, answer], ...]")
        pair = {"'history' question": each[0], "'history' answer": each[1]}
        texts = [read_string(pair, key) for key in pair]
        turns += ChatMessage("user", texts[0]), ChatMessage("assistant", texts[1])
    return turns
