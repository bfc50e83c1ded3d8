"""The code inside the two sandboxes of a trial; standard library only, nothing of Motley.

One runs the program under test, the other its tests. They exchange data alone, a line of JSON a
message, so nothing that the program does to its own interpreter, to a class or to an object
reaches the tests: they compare values that they decoded themselves.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

_OF_ITEMS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "iterator": (Iterator, iter),
}
"""What is sent as a list of items, by name: its type, and what makes it of them."""
_LARGE = 2**63  # Python limits decimal texts of integers, and they are slow


class Left(BaseException):
    """The program under test has ended or answers nonsense; tests cannot catch this as an error."""


def limit(cpu: int, memory: int, threads: int, size: int) -> None:
    """Limit this process, and make it the first to be killed if memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    r = resource
    limits = {
        r.RLIMIT_CPU: cpu,
        r.RLIMIT_AS: memory,
        r.RLIMIT_NPROC: threads,
        r.RLIMIT_FSIZE: size,
        r.RLIMIT_CORE: 0,
        r.RLIMIT_NOFILE: 64,
        r.RLIMIT_MEMLOCK: 0,
        r.RLIMIT_MSGQUEUE: 0,
        r.RLIMIT_SIGPENDING: 64,
    }
    for name, value in limits.items():
        r.setrlimit(name, (value, value))


def encode(value: Any) -> Any:
    """Return a value in JSON's types.

    Raises:
        TypeError: it is not data.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_LARGE < value < _LARGE else {"int": hex(value)}
    for plain in (float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, (kind, _) in _OF_ITEMS.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    raise TypeError(f"{type(value).__name__} is not data: it cannot be handed to a test or back")


def decode(tree: Any) -> Any:
    """Return the value that `encode` was given.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is not from `encode`.
    """
    if not isinstance(tree, list | dict):
        return tree
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    ((name, content),) = tree.items()
    if name in _OF_ITEMS:
        return _OF_ITEMS[name][1]([decode(item) for item in content])
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "int":
        return int(content, 16)
    kind = {"bytes": bytes, "bytearray": bytearray}.get(name)
    if kind is not None:
        return kind.fromhex(content)
    return {"complex": complex, "range": range}[name](*content)


def be_program() -> None:
    """Run the program, then its function for each call of the tests."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    function: Any = None
    for line in requests:
        try:
            message = json.loads(line)
            if function is None:
                namespace: dict[str, Any] = {"__name__": "__main__"}
                exec(compile(message["program"], "program", "exec"), namespace)  # noqa: S102
                function, result = namespace[message["entry_point"]], None
            else:
                result = function(*decode(message["args"]), **decode(message["kwargs"]))
            answer = {"returned": encode(result)}
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            answer = {"raised": names[0], "text": _text(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def be_tests(requests: int, answers: int) -> None:
    """Run the tests; they pass if this returns."""
    job = json.loads(sys.stdin.buffer.read())
    name = job["entry_point"]
    program = Program(name, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))
    program.ask({"program": job["program"], "entry_point": name})
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(job["given"], "given", "exec"), namespace)  # noqa: S102
    namespace[name] = program
    exec(compile(job["test"], "test", "exec"), namespace)  # noqa: S102


class Program:
    """Proxy of the function under test, which is in the other sandbox."""

    def __init__(self, name: str, requests: IO[bytes], answers: IO[bytes]) -> None:
        self.__name__ = name
        self._requests, self._answers = requests, answers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; arguments and result are copies."""
        return self.ask({"args": encode(list(args)), "kwargs": encode(kwargs)})

    def ask(self, message: dict[str, Any]) -> Any:
        """Send a message; return or raise the answer.

        Raises:
            Left: there is none, or it is nonsense.
        """
        try:
            self._requests.write(json.dumps(message).encode() + b"\n")
            self._requests.flush()
            line = self._answers.readline()
        except OSError:
            line = b""
        if not line:
            raise Left("exited before it answered")
        try:
            answer = json.loads(line)
            if "raised" not in answer:
                return decode(answer["returned"])
            error = _error(str(answer["raised"]), str(answer["text"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Left("gave an invalid answer") from None
        raise error


def _error(name: str, text: str) -> Exception:
    """Return an exception like the program's; never one that ends a loop or the process."""
    kind: Any = getattr(builtins, name, None)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    if is_error and not issubclass(kind, StopIteration | StopAsyncIteration):
        try:
            return kind(text)
        except TypeError:  # its arguments differ
            pass
    return RuntimeError(f"{name}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except BaseException:
        return ""


if __name__ == "__main__":
    part, *numbers = sys.argv[1:]
    limit(*map(int, numbers[:4]))
    try:
        if part == "program":
            be_program()
        else:
            be_tests(*map(int, numbers[4:]))
    except Left as reason:
        sys.exit(str(reason))
    except SystemExit:
        sys.exit("exited before its end")
