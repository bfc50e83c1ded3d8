"""The declaration of a question to a host: its name, its function there, and the type of answers.

`Connection.ask` puts it to a host. A new question is a function with one of these decorators, in a
module that `operations.py` imports. Standard library only: agents import this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

from launcher.session.processes import ProcessIdentity

P = ParamSpec("P")
R = TypeVar("R")

DEADLINE = 10.0
"""Seconds that an operation may take by default."""
CHECK_DEADLINE = 15.0
"""Seconds that a check may take by default."""

OPERATIONS: dict[str, Operation[..., Any]] = {}
"""Every operation by its name, but those on the bytes of files and on locks, which differ over a
pipe (`server.py`)."""


@dataclass(frozen=True)
class Operation(Generic[P, R]):
    """A function that an agent calls for a launcher; when called, it is that function.

    Its arguments and its result travel as JSON: plain values, dataclasses and pydantic's models.
    """

    name: str
    function: Callable[P, R]
    deadline: float
    """Seconds that the answer may take."""
    limits: Mapping[str, Any]
    """Keywords of `validate_data`: what its answers may hold."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here."""
        return self.function(*args, **kwargs)

    def with_deadline(self, seconds: float) -> Operation[P, R]:
        """Return the same question with another deadline."""
        return replace(self, deadline=seconds)

    def bind_arguments(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        """Return the arguments of a call by their names."""
        return dict(inspect.signature(self.function).bind(*args, **kwargs).arguments)

    def perform(self, arguments: Mapping[str, Any]) -> R:
        """Call the function with a launcher's arguments; a process is given by its identity."""
        given = dict(arguments)
        for name, kind in get_type_hints(self.function).items():
            if kind is ProcessIdentity:
                given[name] = ProcessIdentity(**given[name])
        untyped: Callable[..., R] = self.function
        return untyped(**given)

    @property
    def result_type(self) -> type[R]:
        """The type of its answers."""
        return get_type_hints(self.function)["return"]


def operation(
    name: str, deadline: float = DEADLINE, **limits: Any
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare a function as an operation.

    Args:
        name: what a request calls it.
        deadline: seconds that its answer may take.
        limits: keywords of `validate_data`, such as `least=0` where no number is negative.
    """

    def declare(function: Callable[P, R]) -> Operation[P, R]:
        declared = Operation(name, function, deadline, limits)
        OPERATIONS[name] = declared
        return declared

    return declare


check = partial(operation, deadline=CHECK_DEADLINE, lines=True)
"""Declare a check: an operation that returns a `Finding`, whose texts may have several lines."""
