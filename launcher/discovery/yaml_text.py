"""Change single values in the text of a YAML file; all other bytes stay as they are.

PyYAML's parser says where each value begins and ends. ruamel.yaml, which writes the whole file
again, drops comments before `---`, where an inventory of `discover` explains itself, respaces flow
mappings, comments and indentation, and writes a user named `no` without quotes, as YAML 1.2 may,
which Ansible reads as false.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from launcher.errors import ConfigError
from launcher.terminal import sanitize_text

_PLAIN = re.compile(r"[A-Za-z0-9_/~][A-Za-z0-9_./@~+-]*")
_NOT_YAML = re.compile("[^\t\x20-\x7e\xa0-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Characters that no YAML file may have, or that `sanitize_text` leaves and a reader drops."""


class YamlText:
    """The text of a YAML file whose top is a mapping.

    Raises:
        ConfigError: it is not YAML, or not a mapping.
    """

    def __init__(self, where: str, text: str) -> None:
        self._where = where
        self.text = text if not text or text.endswith("\n") else f"{text}\n"
        self._parse_root()

    def get(self, path: Sequence[str]) -> Any:
        """Return the value at a path, without tags; None where there is none."""
        node = self._find_node(path)
        return None if node is None else _plain_value(node)

    def list_keys(self, path: Sequence[str]) -> list[str]:
        """Return the keys of the mapping at a path; none where there is not a mapping."""
        node = self._find_node(path)
        entries: list[tuple[yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            entries = node.value
        return [key for name, _ in entries if (key := _key_text(name)) is not None]

    def set(self, path: Sequence[str], value: Any, comment: str = "") -> None:
        """Set the value at a path; missing mappings above it are made.

        Args:
            value: A scalar, or a mapping of scalars.
            comment: For a new line, behind the value.
        """
        *above, key = path
        old = self._find_node(path)
        if old is not None:
            if _plain_value(old) != value:
                self._replace_value(old, value)
            return
        parent = self._find_node(above)
        if parent is None:
            self.set(above, {}, "")
            parent = self._find_node(above)
        assert parent is not None
        self._add_key(parent, above, key, value, comment)

    def _replace_value(self, node: yaml.Node, value: Any) -> None:
        start, end = node.start_mark.index, node.end_mark.index
        if isinstance(node, yaml.CollectionNode) and not node.flow_style:
            raise ConfigError(f"{self._where}:{node.start_mark.line + 1}: {value!r} does not fit")
        gap = " " if start == end and self.text[start - 1 : start] == ":" else ""
        self.text = self.text[:start] + gap + as_yaml(value) + self.text[end:]

    def _add_key(
        self, parent: yaml.Node, path: Sequence[str], key: str, value: Any, comment: str
    ) -> None:
        if isinstance(parent, yaml.MappingNode) and parent.flow_style and parent.value:
            at = parent.end_mark.index - 1
            stop = parent.value[-1][1].end_mark.index
            entry = f", {as_yaml(key)}: {as_yaml(value)}"
            self.text = self.text[:stop] + entry + self.text[stop:at] + self.text[at:]
            return
        note = f"  {as_comment(comment)}" if comment else ""
        if isinstance(parent, yaml.MappingNode) and parent.value:
            column = parent.value[0][0].start_mark.column
            at = self._line_end(parent)
        elif _is_empty(parent):  # `hosts:` or `hosts: {}`: what follows it is one level deeper
            column = self._find_column(path) + 2
            start, end = parent.start_mark.index, parent.end_mark.index
            self.text = self.text[:start].rstrip(" ") + self.text[end:]
            at = self._end_of_line(start - 1)
        else:
            line = parent.start_mark.line + 1
            raise ConfigError(f"{self._where}:{line}: {'.'.join(path)} is not a mapping")
        entry = f"{' ' * column}{as_yaml(key)}: {as_yaml(value)}{note}\n"
        self.text = self.text[:at] + entry + self.text[at:]

    def _find_column(self, path: Sequence[str]) -> int:
        """Return the column of the key at a path."""
        parent = self._find_node(path[:-1])
        assert isinstance(parent, yaml.MappingNode)
        return next(k.start_mark.column for k, _ in parent.value if _key_text(k) == path[-1])

    def _line_end(self, node: yaml.Node) -> int:
        """Return where the line after the last value of a node begins."""
        while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            is_mapping = isinstance(node, yaml.MappingNode)
            last: yaml.Node = node.value[-1][1] if is_mapping else node.value[-1]
            node = last
        end = node.end_mark.index
        return end if self.text[end - 1 : end] == "\n" else self._end_of_line(end)

    def _end_of_line(self, index: int) -> int:
        found = self.text.find("\n", max(0, index))
        return len(self.text) if found < 0 else found + 1

    def _find_node(self, path: Sequence[str]) -> yaml.Node | None:
        node: yaml.Node | None = self._parse_root()
        for key in path:
            if not isinstance(node, yaml.MappingNode):
                return None
            node = next((value for name, value in node.value if _key_text(name) == key), None)
        return node

    def _parse_root(self) -> yaml.Node:
        try:
            found: object = yaml.compose(self.text, yaml.SafeLoader)  # pyright: ignore
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{self._where}:{line}: not YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._where}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(found, yaml.MappingNode):
            raise ConfigError(f"{self._where}: not a YAML inventory, its top is not a mapping")
        return found


def as_yaml(value: Any) -> str:
    """Return a value in one line of YAML, whatever is in its texts."""
    if isinstance(value, list):
        parts: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return f"[{', '.join(map(as_yaml, parts))}]"
    if isinstance(value, dict):
        entries: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return "{" + ", ".join(f"{as_yaml(k)}: {as_yaml(v)}" for k, v in entries.items()) + "}"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")


def as_comment(text: str) -> str:
    """Return a text as a comment of one line; what would end it or is no YAML is escaped.

    It may be a host's or a foreign file's own words.
    """
    return f"# {_NOT_YAML.sub(_escape_text, sanitize_text(text))}"


def _escape_text(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _key_text(node: yaml.Node) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _is_empty(node: yaml.Node) -> bool:
    if isinstance(node, yaml.MappingNode):
        return not node.value
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _plain_value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {_key_text(name): _plain_value(value) for name, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(value) for value in node.value]
    assert isinstance(node, yaml.ScalarNode)
    if node.tag.startswith("tag:yaml.org,2002:") and not node.tag.endswith(":str"):
        return yaml.safe_load(f'!!{node.tag.rpartition(":")[2]} "{node.value}"')
    return node.value
