"""Trees of settings as YAML, read with bounds: a file of some bytes may stand for gigabytes.

Aliases repeat what an anchor names, so a text is as large as what it stands for; and a number may
have as many digits as the file.
"""

from __future__ import annotations

from typing import Any

import yaml

DEEPEST = 64
"""Collections inside one another."""
MOST_NODES = 100_000
"""Values of a text, of an alias as many as its anchor has."""
LONGEST = 1 << 20
"""Bytes of a file; a run config has some hundred lines."""
_LONGEST_NUMBER = 200


def parse_yaml(text: str | bytes) -> Any:
    """Return what a YAML text stands for: collections and plain values alone.

    Raises:
        YAMLError: it is none, has a key twice, or is larger than settings are.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"has more than {LONGEST:,} characters")
    try:
        return yaml.load(text, _BoundedLoader)  # noqa: S506 - a SafeLoader
    except (ValueError, OverflowError, TypeError) as error:  # a date, a number, an odd key
        raise yaml.YAMLError(str(error)) from None


def describe_error(error: yaml.YAMLError) -> tuple[str, str]:
    """Return the place of an error in its text, as `:LINE:COLUMN` or empty, and what is wrong."""
    mark: Any = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return where, problem or next(iter(str(error).splitlines()), "malformed")


class _BoundedLoader(yaml.SafeLoader):
    """Refuses what is deep or large, and a duplicate key: PyYAML takes the last one."""

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, as the base class does."""
        event: Any = self.peek_event()
        is_alias = self.check_event(yaml.AliasEvent)
        if self._depth == DEEPEST:
            raise self._make_error(f"nested deeper than {DEEPEST} levels", event)
        self._depth += 1
        before = self._nodes
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise self._make_error(f"the alias {event.anchor!r} is within its own anchor", event)
        self._nodes += self._sizes[id(node)] if is_alias else 1
        self._sizes.setdefault(id(node), self._nodes - before)
        if self._nodes > MOST_NODES:
            raise self._make_error(f"has more than {MOST_NODES:,} values", event)
        is_text = getattr(node, "tag", None) == "tag:yaml.org,2002:str"
        if isinstance(node, yaml.ScalarNode) and not is_text and len(node.value) > _LONGEST_NUMBER:
            raise self._make_error("a number or date is too long", event)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, as the base class does."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise self._make_error(f"the key {key.value!r} occurs twice", key)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    @staticmethod
    def _make_error(problem: str, place: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
