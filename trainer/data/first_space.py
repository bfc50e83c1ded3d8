"""The space that some tokenizers put before each text, as SentencePiece does."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


def remove_first_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for texts that go on from another one.

    It is the same one if that puts no space before a text.
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
