"""Regular expressions of an adapter for the names of modules, matched with a deadline.

A pattern of twenty characters may take longer than the universe has, and Python's `re` cannot be
interrupted. So a process of its own matches them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainer.system.errors import InputError

_DEADLINE = 10.0
"""Seconds for all patterns and modules: usual ones take milliseconds."""
_MOST = 10_000
"""Patterns; some tools write one for each module."""
_MATCH = """
import json, re, sys
modules, patterns = json.load(sys.stdin)
try:
    found = [re.compile(rf"(.*\\.)?({each})$") for each in patterns]
except (re.error, RecursionError, OverflowError) as error:
    sys.exit(f"not a regular expression: {error}")
first = lambda name: next((n for n, each in enumerate(found) if each.match(name)), None)
print(json.dumps([first(name) for name in modules]))
"""


def values_by_pattern(
    patterns: Any, modules: Collection[str], place: str
) -> Mapping[str, int | float]:
    """Return the value of each module that a pattern matches: of the first one, as in PEFT.

    Args:
        place: names the patterns in messages.

    Raises:
        InputError: they are not patterns with a number each, or take too long.
    """
    if not patterns:
        return {}
    if not isinstance(patterns, dict) or not all(_is_number(value) for value in patterns.values()):
        raise InputError(f"{place} must be an object of numbers by names of modules")
    if len(patterns) > _MOST:
        raise InputError(f"{place} has {len(patterns):,} patterns; at most {_MOST:,} are read")
    names, values = sorted(modules), [*patterns.values()]
    found = _first_matches(names, [*patterns], place)
    return {
        name: values[number]
        for name, number in zip(names, found, strict=True)
        if number is not None
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_matches(
    names: Sequence[str], patterns: Sequence[str], place: str
) -> Sequence[int | None]:
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    job = json.dumps([names, patterns])
    try:
        done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{place} has a regular expression that does not end within {_DEADLINE:.0f} s; name the"
            " modules"
        ) from None
    if done.returncode != 0:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "it cannot be matched")
        raise InputError(f"{place}: {reason}")
    return json.loads(done.stdout)
