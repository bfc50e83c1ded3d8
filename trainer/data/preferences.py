"""Preferences: two answers to a prompt, as texts or as turns (TRL's `chosen` and `rejected`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.data.sample import (
    Sample,
    Tree,
    as_context,
    build_conversation,
    check_target,
    read_completion,
)
from trainer.data.turns import read_turns
from trainer.data.values import BadLineError

BESIDE = ("system", "tools", "functions")
"""Keys that stand beside turns."""


def read_preference(tree: Tree) -> Sample:
    """Read a preference as TRL has it: two answers to a prompt, as texts or as turns.

    Whole conversations begin with the prompt, which is then what both have in common; a text beside
    them must be one of its turns (UltraFeedback).
    """
    if not {"chosen", "rejected"} <= tree.keys():
        raise BadLineError("a preference has 'prompt', 'chosen' and 'rejected'")
    if isinstance(tree["chosen"], str) != isinstance(tree["rejected"], str):
        raise BadLineError("'chosen' and 'rejected' must both be texts, or both be turns")
    prompt = tree.get("prompt")
    if isinstance(prompt, list) or not isinstance(tree["chosen"], list):
        if prompt is None:
            raise BadLineError("'chosen' and 'rejected' are texts, and there is no 'prompt'")
        if isinstance(prompt, str) and (beside := next((k for k in BESIDE if tree.get(k)), None)):
            raise BadLineError(f"'{beside}' needs turns, and 'prompt' is a text")
        found = [read_completion(tree, key) for key in ("chosen", "rejected")]
    else:
        found = _with_common_prompt(tree, prompt)
    chosen, rejected = found
    if chosen == rejected:
        raise BadLineError("'chosen' and 'rejected' are the same")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if answer.messages:
            check_target(key, answer.messages)
    return replace(chosen, rejected=rejected)


def _with_common_prompt(tree: Tree, prompt: Any) -> list[Sample]:
    turns = [read_turns(tree[key], key) for key in ("chosen", "rejected")]
    same = [one == other for one, other in zip(*turns, strict=False)]
    common = (*same, False).index(False)
    context = as_context(turns[0][:common])
    if prompt is not None and all(turn.content != prompt for turn in context):
        raise BadLineError("'prompt' is no turn that both 'chosen' and 'rejected' begin with")
    return [build_conversation(tree, (*context, *answer[common:])) for answer in turns]
