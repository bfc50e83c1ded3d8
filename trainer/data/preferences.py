"""Preferences: two answers to a question, in the forms in which they are published.

- TRL's `chosen` and `rejected`, texts or turns, with a `prompt`, or without one: what both begin
  with is then the prompt
- with the question as `question` (orca), `instruction` and `input` (LLaMA-Factory), or as turns in
  `conversations` or `messages` (LLaMA-Factory, axolotl)
- dialogues as texts, `Human: ... Assistant: ...` (hh-rlhf)

Texts with a `prompt` as text are learned as they are. All else is a conversation, also because a
system text or tools stand beside it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from trainer.data.instructions import read_instruction
from trainer.data.sample import (
    Sample,
    Tree,
    as_context,
    build_conversation,
    check_target,
    read_role_turns,
)
from trainer.data.turns import ChatMessage, read_conversations, read_turns
from trainer.data.values import BadLineError, read_nonempty_text, read_string

ANSWERS = ("chosen", "rejected")
BESIDE = ("system", "tools", "functions")
"""Keys that stand beside turns."""
QUESTIONS = ("prompt", "question", "instruction", "conversations", "messages", "input")
"""Keys of what is asked, of which a line has one; only an instruction has an input as well."""
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")

Turns = tuple[ChatMessage, ...]


def read_preference(tree: Tree) -> Sample:
    """Read two answers to a question, of which one is better.

    Raises:
        BadLineError: they are none.
    """
    if missing := [key for key in ANSWERS if key not in tree]:
        there = ", ".join(f"'{key[:40]}'" for key in list(tree)[:8]) or "none"
        raise BadLineError(
            f"lacks the key '{missing[0]}', and has {there}; a preference has 'chosen', the better"
            " answer, and 'rejected' to a 'prompt': rename yours, or name them with data.columns"
        )
    if isinstance(tree["chosen"], str) != isinstance(tree["rejected"], str):
        raise BadLineError("'chosen' and 'rejected' must both be texts, or both be turns")
    chosen, rejected = _read_texts(tree) or _read_conversations(tree)
    if chosen == rejected:
        raise BadLineError("'chosen' and 'rejected' are the same: none is better; remove the line")
    for key, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if answer.messages:
            check_target(key, answer.messages)
    return replace(chosen, rejected=rejected)


def _question_key(tree: Tree) -> str | None:
    """Return the key of what is asked.

    `messages` beside whole conversations are the better one (UltraFeedback).
    """
    found = [key for key in QUESTIONS if tree.get(key)]
    if "messages" in found and (len(found) > 1 or _are_whole(tree)):
        found.remove("messages")
    if found == ["instruction", "input"]:
        return "instruction"
    if len(found) > 1:
        raise BadLineError(f"has '{found[0]}' and '{found[1]}', and one is allowed; remove one")
    return found[0] if found else None


def _are_whole(tree: Tree) -> bool:
    """Whether the answers are turns that begin with the question."""
    turns = tree["chosen"]
    return isinstance(turns, list) and read_turns(turns, "chosen")[0].role != "assistant"


def _read_texts(tree: Tree) -> list[Sample] | None:
    """Return the answers if question and answers are texts to learn as they are."""
    key = _question_key(tree)
    is_text = isinstance(tree["chosen"], str) and not tree.keys() & {*BESIDE}
    if not is_text or key not in (None, "prompt") or isinstance(tree.get("prompt"), list | dict):
        return None
    texts = [read_nonempty_text(tree, each) for each in ANSWERS]
    if key is None:
        if all(map(_is_dialogue, texts)):
            return None
        prompt = _common_begin(*texts)
        if not prompt:
            raise BadLineError(
                "'chosen' and 'rejected' are texts, and there is no 'prompt'; give the question "
                "as 'prompt', or both with the same begin"
            )
    else:
        prompt = read_string(tree, "prompt")
    if all(text.startswith(prompt) and text != prompt for text in texts):
        texts = [text.removeprefix(prompt) for text in texts]
    return [Sample(text, prompt=prompt) for text in texts]


def _common_begin(one: str, other: str) -> str:
    """Return the words that two texts begin with; the space after them belongs to the rest."""
    differs = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    begin = one[: next(differs, min(len(one), len(other)))]
    if not begin[-1:].isspace():  # within a word
        words = begin.rsplit(None, 1)
        begin = words[0] if len(words) > 1 else ""
    return begin.rstrip()


def _read_conversations(tree: Tree) -> list[Sample]:
    """Return the answers as conversations; what both begin with is context."""
    answers = [_read_answer(tree, key) for key in ANSWERS]
    asked = _read_question(tree, answers)
    if asked and all(answer[: len(asked)] == asked for answer in answers):
        asked = ()
    whole = [(*asked, *answer) for answer in answers]
    same = [one == other for one, other in zip(*whole, strict=False)]
    common = (*same, False).index(False)
    if not common:
        raise BadLineError("has nothing that 'chosen' and 'rejected' answer; give it as 'prompt'")
    context = as_context(whole[0][:common])
    return [build_conversation(tree, (*context, *answer[common:])) for answer in whole]


def _read_answer(tree: Tree, key: str) -> Turns:
    if isinstance(tree[key], str) and _is_dialogue(tree[key]):
        return _read_dialogue(tree[key], key)
    return read_role_turns(tree, key, "assistant")


def _read_question(tree: Tree, answers: list[Turns]) -> Turns:
    """Return the turns of the question; none if the answers begin with it."""
    key = _question_key(tree)
    if key is None:
        return ()
    if key == "instruction":
        return read_instruction(tree, "input")
    if key == "conversations":
        return _without_answer(read_conversations(tree[key], key), key)
    if isinstance(tree[key], list | dict):
        return _without_answer(read_turns(tree[key], key), key)
    asked = read_nonempty_text(tree, key)
    first, second = answers
    if first[0] != second[0] or first[0].role == "assistant":
        return (ChatMessage("user", asked),)
    same = (one for one, other in zip(first, second, strict=False) if one == other)
    if all(turn.content != asked for turn in same):
        raise BadLineError(f"'{key}' is not a turn that both 'chosen' and 'rejected' begin with")
    return ()


def _without_answer(turns: Turns, key: str) -> Turns:
    if turns[-1].role == "assistant":
        raise BadLineError(f"'{key}' ends with an answer, which 'chosen' and 'rejected' are")
    return turns


def _is_dialogue(text: str) -> bool:
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def _read_dialogue(text: str, key: str) -> Turns:
    """Return the turns of a dialogue as text."""
    _, *parts = _SPEAKER.split(text.strip())
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = tuple(
        ChatMessage(roles[speaker], words.strip())
        for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    )
    if turns[-1].role != "assistant" or not turns[-1].content:
        raise BadLineError(f"'{key}' is a dialogue that does not end with an answer")
    return turns
