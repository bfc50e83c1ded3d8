"""The code inside a sandbox: runs a program and its tests; standard library only.

Its standard input is a line that nobody outside can guess, then the source. At the end of the
tests that line is written to standard error: a program that only leaves early has not passed.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback


def limit_process(cpu: int, memory: int, threads: int, size: int) -> None:
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


def run_source() -> str:
    """Run the source; return the line that proves its end, or why it did not come there."""
    token, _, source = sys.stdin.buffer.read().partition(b"\n")
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):  # what it prints leads nowhere
        os.dup2(nothing, descriptor)
    try:
        # Untrusted, and this process is its sandbox (sandbox.py says what that covers).
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})  # noqa: S102
    except SystemExit:
        return "exited early"
    except BaseException as error:
        return _describe_error(error)
    return token.decode()


def _describe_error(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(error)[-1]
    except BaseException:  # its own code describes it
        return type(error).__name__


if __name__ == "__main__":
    limit_process(*map(int, sys.argv[1:]))
    verdict = os.dup(2)
    os.write(verdict, run_source().encode(errors="replace")[:1000])
    os._exit(0)  # neither threads nor what was registered for the end have a say
