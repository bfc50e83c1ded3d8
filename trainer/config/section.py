"""Settings as strict YAML: a file or preset makes a tree, flags override it, a model checks it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from trainer.config.foreign_config import detect_program
from trainer.config.spelling import (
    OPERATOR_SETTINGS,
    explain_setting,
    find_nearest_key,
    format_hint,
)
from trainer.system.errors import InputError, plain_reason
from trainer.system.regular_file import read_text
from trainer.system.yaml_tree import LONGEST, describe_error, parse_yaml

LARGEST = 2**53
"""The largest integer of a setting: every reader of JSON keeps it exactly."""


class Section(BaseModel):
    """A strict group of settings: an unknown key is an error, and so is a number without end."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )
    SHORTHAND_KEY: ClassVar[str | None] = None
    """The setting that is meant if a file has a text in place of the section: `model: DIR`."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_non_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `yes` for a number: Python takes true as 1."""
        kinds = set(_iter_types(cls.model_fields[str(info.field_name)].annotation))
        if not kinds.isdisjoint((int, float)):
            parts: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
            if bool not in kinds and any(isinstance(part, bool) for part in parts):
                raise ValueError(
                    "a number is needed; YAML reads yes, no, on and off as true, false"
                )
            if any(isinstance(part, int) and abs(part) > LARGEST for part in parts):
                raise ValueError(f"input should be at most {LARGEST:,}")
        return value


AnySection = TypeVar("AnySection", bound=Section)


def load_settings(
    kind: type[AnySection],
    source: str | Path | None,
    presets: Mapping[str, Path],
    overrides: Mapping[str, Any] | None = None,
) -> AnySection:
    """Read settings of a kind from a YAML file or a preset's name and apply dotted overrides.

    `overrides` maps paths such as `training.epochs` to values; None is null, as in a file.

    Raises:
        InputError: the file cannot be read, or a key or value is wrong (names its path).
    """
    tree = _read_source(source, presets) if source is not None else {}
    return build_settings(kind, tree, overrides or {}, source or "flags")


def build_settings(
    kind: type[AnySection], tree: dict[str, Any], overrides: Mapping[str, Any], where: str | Path
) -> AnySection:
    """Return settings of a kind from a tree, with dotted overrides.

    A section that is null, or empty in a file, has its defaults.

    Raises:
        InputError: a key or value is wrong; names `where` and its path.
    """
    tree |= {key: _expand_shorthand(kind, key, value) for key, value in tree.items()}
    for dotted, value in overrides.items():
        short = _shorthand_key(kind, dotted) if isinstance(value, str) else None
        _set_dotted(
            tree,
            f"{dotted}.{short}" if short else dotted,
            value if short else _expand_shorthand(kind, dotted, value),
        )
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{where}: {_explain_error(error, kind)}") from None


def format_yaml(settings: Mapping[str, Any]) -> str:
    """Return YAML of settings by their dotted paths, unchecked."""
    tree: dict[str, Any] = {}
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return yaml.safe_dump(tree, sort_keys=False)


def _shorthand_key(kind: type[Section], key: str) -> str | None:
    inner = _nested_section(kind, key)
    return inner.SHORTHAND_KEY if inner is not None and issubclass(inner, Section) else None


def _expand_shorthand(kind: type[Section], key: str, value: Any) -> Any:
    """Return a section as a mapping: a text is the setting that it is short for, null is empty."""
    if isinstance(value, str) and (short := _shorthand_key(kind, key)):
        return {short: value}
    is_section = _nested_section(kind, key) is not None
    return {} if value is None and is_section and not _may_be_null(kind, key) else value


def _may_be_null(kind: type[Section], key: str) -> bool:
    return NoneType in _iter_types(kind.model_fields[key].annotation)


def parse_assignments(texts: Iterable[str], flag: str) -> dict[str, Any]:
    """Read the `KEY=VALUE` of a flag; a value is YAML, so numbers and lists keep their type.

    Raises:
        InputError: one has no key, or its value is not YAML.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{flag} {text}: give KEY=VALUE")
        try:
            found[key.strip()] = parse_yaml(value)
        except yaml.YAMLError:
            raise InputError(f"{flag} {text}: the value is not valid YAML") from None
    return found


def setting_keys(kind: type[Section]) -> list[str]:
    """Return the dotted paths of every setting of a kind."""
    keys: list[str] = []
    for name in kind.model_fields:
        inner = _nested_section(kind, name)
        if inner is not None and issubclass(inner, Section):
            keys += [f"{name}.{key}" for key in setting_keys(inner)]
        else:
            keys.append(name)
    return keys


def _read_source(source: str | Path, presets: Mapping[str, Path]) -> dict[str, Any]:
    path = Path(source)
    if not path.exists():
        if str(source) not in presets:
            names = ", ".join(presets) or "none"
            nearest = format_hint(next(iter(get_close_matches(str(source), presets, n=1)), None))
            raise InputError(f"no config file and no preset '{source}' (presets: {names}){nearest}")
        path = presets[str(source)]
    tree = read_yaml(path)
    if (program := detect_program(tree)) is not None:
        raise InputError(
            f"{path}: is a config of {program.name}; write one of ours from it: launch init --from"
            f" {path}"
        )
    return tree


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Raises:
        InputError: it cannot be read, is no YAML, or holds something else.
    """
    try:
        tree: Any = parse_yaml(read_text(path, LONGEST))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {plain_reason(error)}") from None
    except yaml.YAMLError as error:
        where, problem = describe_error(error)
        raise InputError(f"{path}{where}: not valid YAML: {problem}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a run config is a mapping of settings, see docs/config.md")
    return cast("dict[str, Any]", tree)


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        branch = tree[parent]
        if not isinstance(branch, dict):
            raise InputError(f"{parent}: must be a mapping of settings")
        tree = branch  # pyright: ignore[reportUnknownVariableType]
    tree[leaf] = value


def _explain_error(error: ValidationError, kind: type[Section]) -> str:
    """Return one line for the first wrong key: its path, what is wrong, what is allowed."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_dotted_path(detail["loc"], kind), []).append(detail)
    (path, details), *rest = by_path.items()
    first = details[0]
    if path in OPERATOR_SETTINGS and first["type"] == "extra_forbidden":
        return f"{path}: {OPERATOR_SETTINGS[path]}"
    if first["type"] == "extra_forbidden":
        keys = setting_keys(kind)
        sections = {key[:end] for key in keys for end, sign in enumerate(key) if sign == "."}
        nearest = find_nearest_key(path, [*keys, *sorted(sections)])
        allowed = ", ".join(_list_siblings(first["loc"], kind))
        message = f"unknown key (allowed: {allowed}){format_hint(nearest)}"
        message += explain_setting(path, first["input"])
    else:
        # A value of several allowed kinds has one message for each of them.
        messages = dict.fromkeys(detail["msg"].removeprefix("Value error, ") for detail in details)
        message = ", or ".join(text[0].lower() + text[1:] for text in messages)
        if first["type"] == "model_type":
            keys = ", ".join(_list_siblings((*first["loc"], ""), kind))
            message = f"a mapping of settings is needed ({keys})"
        elif first["type"] == "tuple_type":
            message = "a list is needed"
        elif first["input"] is None and first["type"] != "missing":
            return f"{path}: must not be null; leave it out"
        if first["type"] != "missing" and not isinstance(first["input"], dict):
            message += f"; got {first['input']!r}"
    more = f" (and {len(rest)} more)" if rest else ""
    return f"{path}: {message}{more}"


def _dotted_path(location: tuple[int | str, ...], kind: type[Section]) -> str:
    """Return the dotted path of a setting, without pydantic's names for a union's branches."""
    parts: list[str] = []
    section: type[BaseModel] | None = kind
    for part in location:
        if isinstance(part, str) and section is None:
            break
        parts.append(str(part))
        section = _nested_section(section, part)
    return ".".join(parts) or "config"


def _list_siblings(location: tuple[int | str, ...], kind: type[Section]) -> list[str]:
    section: type[BaseModel] | None = kind
    for part in location[:-1]:
        section = _nested_section(section, part)
    return list(section.model_fields) if section is not None else []


def _iter_types(annotation: Any) -> Iterator[type]:
    """Yield the plain types of an annotation; of a literal none."""
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _iter_types(part)


def _nested_section(section: type[BaseModel] | None, part: int | str) -> type[BaseModel] | None:
    """Return the group that a setting holds, also an optional one; None for a plain value."""
    field = section.model_fields.get(str(part)) if section is not None else None
    if field is None:
        return None
    kinds = [field.annotation]
    if get_origin(field.annotation) in (Union, UnionType):  # a list of groups has no keys
        kinds += get_args(field.annotation)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
