"""The Jinja of chat templates, as transformers runs it.

A template is untrusted code: it runs in Jinja's sandbox and sees plain JSON values.

`strftime_now` gives a fixed date, so that the same data gives the same tokens on any day.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache, partial, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from trainer.config.data import TEMPLATE_DATE

MOST_WORK = 1_000_000
"""Limit of one rendering: passes of loops, KiB of joined text, and calls, each as ten of them."""
_CALL = 10
MOST_TEXT = 1 << 24
"""Characters of a joined or repeated text, items of such a list, and bits of a power."""
LEARNED, LEARNED_END = "\ufdd3", "\ufdd4"
"""Around the parts that a template marks with `{% generation %}`; noncharacters of Unicode."""


@lru_cache(maxsize=4)
def compile_template(source: str, today: str = TEMPLATE_DATE) -> Callable[..., str]:
    """Return a function that renders a template with variables given by name.

    Args:
        today: the date that the template gets if it asks, as `YYYY-MM-DD`.

    Raises:
        TemplateError: it is not Jinja.
    """
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = environment.bounded_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = partial(_format_date, datetime.fromisoformat(today))
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # a chain of dicts is copied slowly, each time

    def render(*args: Any, **variables: Any) -> str:
        environment.begin_rendering()
        return template.render(*args, **variables)

    return render


_WIDE = frozenset(
    (
        *("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"),
        *("indent", "wordwrap", "truncate", "batch", "slice", "tojson", "pprint"),
    )
)
"""Methods of texts and filters whose result grows with a number."""
_WIDEST = 10_000
_CONTEXTS = (EvalContext, Context)
_LONGEST_FORMAT = 1000
_CLOCKS = re.compile(r"%[-_0^#]*\d*s")
"""The seconds since 1970, which depend on the machine's time zone."""
_WIDTHS = re.compile(r"[%{][^%{}]*(\d{5}|\{)")
"""A width of five digits, or of a value."""


def _check_growth(name: str, text: Any, values: Sequence[Any]) -> None:
    """Check that a method of a text, a filter or `%` makes no text that is too large.

    Raises:
        SecurityError: it would.
    """
    if name in _WIDE and any(isinstance(n, int) and abs(n) > _WIDEST for n in values):
        raise SecurityError(f"a width of {name} is too large")
    if not isinstance(text, str):
        return
    if name in ("format", "format_map", "%") and _WIDTHS.search(text):
        raise SecurityError(f"a width of {name} is too large")
    parts = [len(value) for value in _flatten_values(values) if isinstance(value, str)]
    times = {"%": text.count("%"), "replace": len(text)}.get(name, text.count("{"))
    if name == "join":  # also a filter, whose list is `values`
        times, parts = max(map(_measure_length, values), default=0), [*parts, len(text)]
    if times * max(parts, default=0) > MOST_TEXT:
        raise SecurityError(f"a result of {name} is too large")


def _flatten_values(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def _measure_length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox of Jinja, with an end to the loops and calls of each rendering."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in (_WIDE | {"join", "replace"}) & self.filters.keys():
            self.filters[name] = self.bounded_filter(name, self.filters[name])
        del self.globals["lipsum"]  # random text; with a number as much as one likes
        self.filters["bounded_items"] = self._count_items
        self.filters["bounded_text"] = self._check_text
        self.filters["bounded_sum"] = lambda value: (
            self._check_text(value) if isinstance(value, str | list | tuple) else value
        )
        self._work = threading.local()

    def begin_rendering(self) -> None:
        """Begin a rendering of this thread."""
        self._work.done = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def call(self, *args: Any, **named: Any) -> Any:
        """Count a call, of a macro for example: two of itself in each never end."""
        self._count_work(_CALL)
        method = getattr(args[1], "__wrapped__", args[1])  # the sandbox wraps `format`
        name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        _check_growth(name, text, [*args[2:], *named.values()])
        return super().call(*args, **named)

    def concat(self, parts: Iterable[str]) -> str:
        """Return the text of a block or of all, which is not too large."""
        found: list[str] = []
        size = 0
        for part in parts:
            found.append(part)
            size += len(part)
            if size > MOST_TEXT:
                raise SecurityError("a joined text or list is too large")
        return "".join(found)

    def bounded_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter whose result is of the size that texts may have."""

        @wraps(made)
        def call_bounded(*args: Any, **named: Any) -> Any:
            own = [each for each in args if each is not self and not isinstance(each, _CONTEXTS)]
            text, values = (own[0] if own else None), [*own[1:], *named.values()]
            if name == "join":
                text, values = (values[0] if values else ""), own[:1]
            _check_growth(name, text, values)
            found = made(*args, **named)
            return self._check_text(found) if isinstance(found, str) else found

        return call_bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power that is not too large."""
        if operator == "%":
            _check_growth("%", left, right if isinstance(right, tuple) else [right])
            starred = isinstance(left, str) and "*" in left
            large = starred and any(
                isinstance(n, int) and abs(n) > _WIDEST for n in _flatten_values([right])
            )
        elif operator == "**":
            large = all(isinstance(each, int) for each in (left, right)) and (
                left.bit_length() * right > MOST_TEXT
            )
        else:
            pairs = ((left, right), (right, left))
            large = any(
                isinstance(count, int)
                and hasattr(some, "__len__")
                and len(some) * count > MOST_TEXT
                for some, count in pairs
            )
        if large:
            raise SecurityError(f"a result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _count_items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count_work(1)
            yield item

    def _check_text(self, text: Any) -> Any:
        if len(text) > MOST_TEXT:
            raise SecurityError("a joined text or list is too large")
        self._count_work(len(text) >> 10)
        return text

    def _count_work(self, work: int) -> None:
        self._work.done = getattr(self._work, "done", 0) + work
        if self._work.done > MOST_WORK:
            raise SecurityError(f"the template does not end within {MOST_WORK:,} passes and calls")


class _Bounds(NodeTransformer):
    """Puts the filters that count around what loops run over, and around joined text."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        node.iter = _wrap_filter(node.iter, "bounded_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - Jinja's name
        return _wrap_filter(self.generic_visit(node), "bounded_text")

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:  # noqa: N802 - Jinja's name
        return _wrap_filter(self.generic_visit(node), "bounded_sum")


def _wrap_filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


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
        raise SecurityError(f"a namespace may not contain {name!r}")


def _format_date(now: datetime, format: str) -> str:
    if len(format) > _LONGEST_FORMAT:
        raise SecurityError("a format of a date is too large")
    if found := _CLOCKS.search(format):
        raise TemplateError(f"strftime_now has no {found[0]}: it gives a date, not a time")
    return now.strftime(format)


def _raise_template_error(message: str) -> None:
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
