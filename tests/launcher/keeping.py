"""Small processes for supervisors to keep."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.session import ProcessState, SessionSupervisor
from tests.waiting import wait_for

PARENT = "from trainer.system.process.prefork import fork_workers\nfork_workers(lambda: None)\n"


def python_process(folder: Path, code: str, name: str = "worker-0") -> ProcessPlan:
    """Return a plan that runs a piece of Python."""
    return ProcessPlan(
        name=name,
        role="worker",
        rank=0,
        local_rank=0,
        host="localhost",
        device="cpu",
        backend="cpu",
        threads=1,
        address="127.0.0.1:9000",
        argv=(sys.executable, "-c", code),
        env={"PYTHONUNBUFFERED": "1"},
        folder=str(folder / name),
        certificate_names=(),
    )


def asked_to_stop(word: str) -> str:
    """Return code that says a word and goes on once it gets SIGTERM.

    A handler of Python's would not do: between its look for signals and the call that sleeps,
    `time.sleep` loses one (2 of 4,000 that were sent at that moment).
    """
    return (
        "import signal\nasked = {signal.SIGTERM}\nsignal.pthread_sigmask(signal.SIG_BLOCK, asked)\n"
        f"print({word!r})\nsignal.sigwait(asked)\n"
    )


def wait_until_running(
    supervisor: SessionSupervisor, process: ProcessPlan, attempt: int = 1
) -> ProcessState:
    """Return an attempt's state once it runs, which is written after its child may print."""

    def runs() -> bool:
        state = supervisor.read_state(process)
        return (state.state, state.attempt) == ("running", attempt)

    wait_for(runs, f"attempt {attempt} to run")
    return supervisor.read_state(process)


class ForkingSupervisor(SessionSupervisor):
    """Sessions whose program imports once and forks a child for each attempt."""

    def start_process(
        self, process: ProcessPlan, leader: ProcessPlan | None = None, notify: Sequence[str] = ()
    ) -> None:
        if process.argv[1:2] == ("-c",):
            process = replace(process, argv=(*process.argv[:2], PARENT + process.argv[2]))
        super().start_process(process, leader, notify)
