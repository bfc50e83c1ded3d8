"""Wrong programs that want to pass.

Each attack works where program and tests share a process, as in `naive` (which also has a secret
that only the end of the tests gives away). In the sandbox none does.
"""

from __future__ import annotations

import secrets
import subprocess
import sys

import pytest

from tests.trainer.evaluate.confinement import open_sandbox
from trainer.evaluate.boxed import decode, encode
from trainer.evaluate.sandbox import Sandbox, Trial

TEST = """
def check(candidate):
    from math import isclose
    secret = "a value that only the tests know"
    cases = [(1, 2), (5, 10), (secret, secret + secret)]
    assert all(candidate(x) == y for x, y in cases)
    for got, (_, y) in zip(map(candidate, [x for x, _ in cases]), cases):
        assert got == y
    assert candidate(7) == 14, "wrong"
    assert isclose(candidate(0.5), 1.0)
"""
RIGHT = "def double(x):\n    return x + x\n"
WRONG = "def double(x):\n    return None\n"

NAIVE = """
import sys
token, program = sys.stdin.readline(), sys.stdin.read()
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
sys.stderr.write(token)
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox(seconds=60)


def naive(program: str, test: str = TEST, with_token: bool = True) -> bool:
    """Judge as is often done: all in one process, and passed is what ends well."""
    token = secrets.token_hex(16)
    done = subprocess.run(
        [sys.executable, "-I", "-c", NAIVE],
        input=f"{token}\n{program}\n{test}\ncheck(double)\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.strip().split("\n")[-1]
    return done.returncode == 0 and (last == token or not with_token)


def judged(sandbox: Sandbox, program: str, test: str = TEST) -> bool:
    called = f"{test}\ncheck(double)\n"
    return sandbox.run(Trial(program=program, entry_point="double", test=called)).passed


def test_both_know_right_from_wrong(sandbox: Sandbox) -> None:
    for judge in (naive, lambda program: judged(sandbox, program)):
        assert judge(RIGHT)
        assert not judge(WRONG)


LEAVE = "import os, sys\ndef leave(token):\n    sys.stderr.write(token); sys.stderr.flush()\n"
LEAVE += "    os._exit(0)\n"
TOKEN_ATTACKS = {
    "main": LEAVE + "import __main__\nleave(__main__.token)\n",
    "frames": LEAVE
    + """
frame = sys._getframe()
while frame is not None:
    if "token" in frame.f_globals:
        leave(frame.f_globals["token"])
    frame = frame.f_back
""",
    "garbage collector": LEAVE
    + """
import gc
for thing in gc.get_objects():
    if type(thing) is dict and "token" in thing and "program" in thing:
        leave(thing["token"])
""",
    "excepthook": LEAVE
    + """
import __main__
sys.excepthook = lambda *_: leave(__main__.token)
""",
    "own memory": LEAVE
    + """
import re
with open("/proc/self/maps") as maps:
    for line in maps:
        span, rights = line.split()[:2]
        if rights.startswith("rw") and "[v" not in line:
            start, end = (int(part, 16) for part in span.split("-"))
            with open("/proc/self/mem", "rb") as memory:
                memory.seek(start)
                found = re.search(rb"[^0-9a-f]([0-9a-f]{32}\\n)", memory.read(end - start))
            if found:
                leave(found[1].decode())
""",
}


@pytest.mark.parametrize("attack", TOKEN_ATTACKS.values(), ids=TOKEN_ATTACKS)
def test_a_secret_of_the_judge_is_of_no_use(sandbox: Sandbox, attack: str) -> None:
    assert naive(attack + WRONG)
    assert not judged(sandbox, attack + WRONG)


EXIT_ATTACKS = {
    "_exit": "import os; os._exit(0)",
    "_exit when called": "import os\ndef double(x): os._exit(0)",
    "SystemExit when called": "def double(x): raise SystemExit(0)",
    "atexit": "import atexit, os; atexit.register(os._exit, 0)\n" + WRONG,
    "replaced by another program": "import os; os.execv('/bin/true', ['true'])",
}


@pytest.mark.parametrize("attack", EXIT_ATTACKS.values(), ids=EXIT_ATTACKS)
def test_leaving_well_is_not_passing(sandbox: Sandbox, attack: str) -> None:
    assert naive(attack, with_token=False)
    assert not judged(sandbox, attack)


IN_PROCESS_ATTACKS = {
    "an object that equals all": """
class All:
    def __eq__(self, other): return True
    def __float__(self): return 1.0
def double(x): return All()
""",
    "a number that equals all": """
class All(float):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = float.__hash__
def double(x): return All(1.0)
""",
    "builtins": """
import builtins, math
builtins.all, builtins.map, builtins.zip = lambda _: True, lambda *_: [], lambda *_: []
math.isclose = lambda *_, **__: True
def double(x): return 14
""",
    "the tests' own names": """
import sys
class Names(dict):
    pass
def double(x):
    frame = sys._getframe(1)
    while "cases" not in frame.f_locals:
        frame = frame.f_back
    x = 0.5 if x == 0.5 else x
    return dict(frame.f_locals["cases"]).get(x, {7: 14, 0.5: 1.0}.get(x))
""",
}


@pytest.mark.parametrize("attack", IN_PROCESS_ATTACKS.values(), ids=IN_PROCESS_ATTACKS)
def test_what_a_program_does_to_its_interpreter_stays_there(sandbox: Sandbox, attack: str) -> None:
    assert naive(attack)
    assert not judged(sandbox, attack)


def test_an_exception_cannot_end_the_loop_of_a_test(sandbox: Sandbox) -> None:
    """Raised below `map`, StopIteration says that there is nothing more to check."""
    test = (
        "def check(candidate):\n    for got in map(candidate, range(9)):\n        assert got == 1\n"
    )
    for kind in ("StopIteration", "type('Own', (StopIteration,), {})"):
        attack = f"def double(x): raise {kind}\n"
        assert naive(attack, test)
        assert not judged(sandbox, attack, test)


def test_nothing_of_the_tests_is_within_reach(sandbox: Sandbox) -> None:
    """No process, no file and no descriptor of the tests' sandbox; what is open is its own."""
    program = """
import os
def look():
    processes = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    found = []
    for process in processes:
        try:
            command = open(f"/proc/{process}/cmdline", "rb").read()
        except OSError:
            continue
        found.append((process, os.path.basename(command.split(b"\\0")[0]).decode()))
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
        except OSError:
            pass
    return found, files, os.environ.copy() == {} or sorted(os.environ), os.getppid()
"""
    test = """
found, files, environment, parent = look()
assert [(number, name[:6]) for number, name in found] == [(1, "python")], found
assert all(kind in ("pipe", "/dev/null") for kind in files.values()), files
assert sum(kind == "pipe" for kind in files.values()) <= 3, files
assert parent == 0, parent
"""
    verdict = sandbox.run(Trial(program=program, entry_point="look", test=test))
    assert verdict.passed, verdict.reason


def test_what_it_writes_to_its_descriptors_is_an_answer_or_nonsense(sandbox: Sandbox) -> None:
    for words in ("passed\\n", '{"returned": {"iterator": 1}}\\n', "[]\\n" * 100, "{}\\n", "\\n"):
        attack = f"import os\nfor number in range(64):\n    try: os.write(number, b'{words}')\n"
        attack += "    except OSError: pass\n" + WRONG
        assert not judged(sandbox, attack), words
    early = '{"returned": true}\\n' * 20
    attack = f"import os\nfor number in range(64):\n    try: os.write(number, b'{early}')\n"
    attack += "    except OSError: pass\n" + WRONG
    assert not judged(sandbox, attack), "an answer ahead of its question is a value like others"


def test_a_reason_has_nothing_that_moves_a_cursor(sandbox: Sandbox) -> None:
    program = "def f(): raise ValueError('\\x1b[2Jall passed')\n"
    verdict = sandbox.run(Trial(program=program, entry_point="f", test="f()"))
    assert verdict.reason == "ValueError: ?[2Jall passed"


def test_errors_come_across_as_what_they_are(sandbox: Sandbox) -> None:
    program = """
class Own(KeyError): pass
def f(kind):
    if kind == "own": raise Own("x")
    if kind == "decode": b"\\xff".decode()
    if kind == "zero": 1 / 0
    if kind == "exit": raise SystemExit(0)
    if kind == "lost": return object()
"""
    test = """
def raised(kind):
    try:
        f(kind)
    except Exception as error:
        return type(error).__name__, str(error)
assert raised("own")[0] == "KeyError"
assert raised("zero") == ("ZeroDivisionError", "division by zero")
assert raised("exit") == ("RuntimeError", "SystemExit: 0")
assert raised("decode")[0] == "RuntimeError", "its own arguments are lost"
assert raised("lost")[0] == "TypeError" and "object is not data" in raised("lost")[1]
"""
    verdict = sandbox.run(Trial(program=program, entry_point="f", test=test))
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**200,
        1.5,
        float("inf"),
        "text\ud800\n",
        b"\x00\xff",
        bytearray(b"x"),
        [1, [2, (3,)]],
        (),
        {1: "a", (1, 2): {"b": {3}}},
        frozenset({1}),
        1 + 2j,
        range(1, 9, 2),
    ],
    ids=repr,
)
def test_data_comes_across_as_it_is(value: object) -> None:
    import json

    there = decode(json.loads(json.dumps(encode(value))))
    assert there == value
    assert type(there) is type(value)


def test_iterators_come_across_and_subclasses_as_what_they_are_made_of() -> None:
    from collections import Counter, OrderedDict

    assert list(decode(encode(iter([1, 2])))) == [1, 2]
    assert decode(encode(Counter("aab"))) == {"a": 2, "b": 1}
    assert type(decode(encode(OrderedDict(a=1)))) is dict
    for value in (object(), len, {1: object()}, Exception()):
        with pytest.raises(TypeError, match="is not data"):
            encode(value)
