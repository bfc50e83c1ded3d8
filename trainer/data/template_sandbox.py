"""The Jinja of chat templates, as transformers runs it.

A template is untrusted code: it runs in Jinja's sandbox and sees plain JSON values.

`strftime_now` is not defined: a template that tests for it uses its own fixed date, so that the
same data gives the same tokens on any day.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LEARNED, LEARNED_END = "\ufdd3", "\ufdd4"
"""Around the parts that a template marks with `{% generation %}`; noncharacters of Unicode."""


@lru_cache(maxsize=4)
def compile_template(source: str) -> Callable[..., str]:
    """Return a function that renders a template with variables given by name.

    Raises:
        TemplateError: it is not Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source).render


class _Generation(Extension):
    """`{% generation %}`: contains what the assistant generates."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{LEARNED}{caller()}{LEARNED_END}"


class _Dict:
    """`dict` without the attributes of the class, which lead out of the sandbox."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore, for the same reason."""

    def __init__(*args: Any, **named: Any) -> None:  # a template may pass a name `self`
        own, rest = args[0], args[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
