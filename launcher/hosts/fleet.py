"""Several hosts at once: each answers within its deadline or fails, and none delays the others.

`ask_hosts` puts one question to each host, `ask_each` any number; nothing else queries hosts at
once.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from launcher.errors import LauncherError, PreflightError, UnreachableError
from launcher.hosts import ssh
from launcher.hosts.base import Connection, invalid_answer
from launcher.inventory.hosts import Host

LOOK = 3.0
"""Seconds after which a look shows what it knows: hosts that are late are still asked."""
REACH = 20.0
"""Seconds that reaching the hosts may take: the deadlines of a login are shorter."""
AT_ONCE = 64
"""Hosts that are queried concurrently: each needs threads and processes here."""
_SILENCE = 10.0
"""Seconds for which an unreachable host is not queried again."""

C = TypeVar("C")
T = TypeVar("T")
Trouble = LauncherError | OSError
"""The errors of a host: it does not answer (UnreachableError), or it refuses."""


class LateError(UnreachableError):
    """A host has not answered a look yet; its login, or its answer, is under way."""


class _NoAnswerError(UnreachableError):
    """A question has not been answered by its deadline."""


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The answers and errors by host; every host is in one of the two."""

    found: dict[str, T]
    errors: dict[str, Trouble]

    @property
    def late(self) -> list[str]:
        """The hosts that have not answered yet, but may."""
        return [name for name, error in self.errors.items() if isinstance(error, LateError)]

    def require(self, refusal: type[LauncherError] = PreflightError) -> dict[str, T]:
        """Return what was found, or raise the errors of all hosts as one.

        Raises:
            LauncherError: of the first host's kind, `refusal` for its OSError; the lines of the
                other hosts are its details.
        """
        lines = [format_error(name, error) for name, error in self.errors.items()]
        for error in self.errors.values():
            kind = type(error) if isinstance(error, LauncherError) else refusal
            details = error.details if isinstance(error, LauncherError) else ()
            raise kind(lines[0], [*details, *lines[1:]])
        return self.found


def format_error(name: str, error: Trouble) -> str:
    """Return one line that names the host."""
    if isinstance(error, LauncherError):
        text = str(error)
        return text if name in text else f"host {name}: {text}"
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"host {name}: {what or error}"


def describe_pending(names: Iterable[str]) -> str:
    """Return the line that says which hosts are still asked."""
    return f"querying {', '.join(names)} ..."


def ask_hosts(
    hosts: Iterable[Host],
    question: Callable[[Host, Connection], T],
    deadline: float = LOOK,
    enough: str | None = None,
    on_late: Callable[[Answers[T]], None] | None = None,
) -> Answers[T]:
    """Connect to all hosts at once and put a question to each.

    A look skips a host that did not answer a moment ago; a call with a longer deadline tries it
    again. Logins go on after a look, so that the next one finds them.

    Args:
        enough: a host whose answer ends the wait for the others, which then are in neither part.
        on_late: takes the answers of a look at which hosts were late; these are then asked until
            their logins' own deadlines.
    """
    chosen = {host.name: host for host in hosts}
    answers = _ask_chosen(chosen, question, deadline, enough)
    if on_late is None or not answers.late:
        return answers
    on_late(answers)
    again = _ask_chosen({name: chosen[name] for name in answers.late}, question, REACH)
    found, errors = answers.found | again.found, answers.errors | again.errors
    return Answers(
        {name: found[name] for name in chosen if name in found},
        {name: errors[name] for name in chosen if name in errors and name not in found},
    )


def _ask_chosen(
    chosen: Mapping[str, Host],
    question: Callable[[Host, Connection], T],
    deadline: float,
    enough: str | None = None,
) -> Answers[T]:
    def connect(host: Host) -> Connection:
        since, error = _SILENT.get(host, (0.0, None))
        if error is not None and deadline <= LOOK and time.monotonic() - since < _SILENCE:
            raise error
        try:
            there = ssh.connect_host(host)
        except UnreachableError as error:  # recorded here, as nothing else waits for a late login
            _SILENT[host] = (time.monotonic(), error)
            raise
        _SILENT.pop(host, None)
        return there

    questions = {name: (host, partial(question, host)) for name, host in chosen.items()}
    answers = ask_each(questions, deadline, connect, enough)
    errors: dict[str, Trouble] = {}
    for name, error in answers.errors.items():
        is_late = isinstance(error, _NoAnswerError) and deadline <= LOOK
        errors[name] = LateError(describe_pending([name])) if is_late else error
        if isinstance(error, UnreachableError):
            _SILENT.setdefault(chosen[name], (time.monotonic(), errors[name]))
    return Answers(answers.found, errors)


_SILENT: dict[Host, tuple[float, Trouble]] = {}
"""Hosts that did not answer, and since when."""


def ask_each(
    questions: Mapping[str, tuple[Host, Callable[[C], T]]],
    deadline: float | Mapping[str, float],
    connect: Callable[[Host], C],
    enough: str | None = None,
    most: int = AT_ONCE,
) -> Answers[T]:
    """Put questions to their hosts concurrently, and return the answers by question.

    A late question continues in a daemon thread whose result is dropped.

    Args:
        deadline: seconds, for all questions or for each, for every `most` of them.
        connect: returns what a question gets of its host, such as `ssh.connect`.
        enough: a question whose answer ends the wait for the others, which then are in neither
            part.
        most: questions that are under way at a time.
    """
    deadlines = deadline if isinstance(deadline, Mapping) else dict.fromkeys(questions, deadline)
    waiting = deque(questions.items())
    ended: queue.SimpleQueue[tuple[str, T | BaseException]] = queue.SimpleQueue()

    def ask_next_hosts() -> None:
        with contextlib.suppress(IndexError):  # none is waiting
            while True:
                name, (host, question) = waiting.popleft()
                ended.put((name, _answer_or_error(host, question, connect)))

    for _ in range(min(len(questions), most)):
        threading.Thread(target=ask_next_hosts, daemon=True).start()
    found: dict[str, T] = {}
    errors: dict[str, Trouble] = {}
    began = time.monotonic()
    try:
        while (due := questions.keys() - found.keys() - errors.keys()) and enough not in found:
            until = began + max(deadlines[name] for name in due) * math.ceil(len(questions) / most)
            name, outcome = ended.get(timeout=max(0.0, until - time.monotonic()))
            if isinstance(outcome, LauncherError | OSError):
                errors[name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                found[name] = outcome
    except queue.Empty:
        for name in questions.keys() - found.keys() - errors.keys():
            late = f"no answer within {deadlines[name]:.0f} s"
            text = f"host {questions[name][0].name}: {late}; is it up and reachable?"
            errors[name] = _NoAnswerError(text)
    finally:
        waiting.clear()
    ordered = {name: found[name] for name in questions if name in found}
    return Answers(ordered, {name: errors[name] for name in questions if name in errors})


def _answer_or_error(
    host: Host, question: Callable[[C], T], connect: Callable[[Host], C]
) -> T | BaseException:
    try:
        return question(connect(host))
    except ValueError as error:  # not the bytes or the operation of this version
        return invalid_answer(host.name, error)
    except BaseException as error:  # raised again in the waiting thread
        return error
