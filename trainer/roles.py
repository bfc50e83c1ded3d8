"""The roles of `trainer finetune`: alone, coordinator, worker."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import build
from trainer.config.run import Backend, RunConfig
from trainer.errors import InputError, RefusedError, TrainerError
from trainer.exchange.transport import tls
from trainer.process.prefork import FALLBACK_VARIABLE
from trainer.storage.lease import refuse_if_held

if TYPE_CHECKING:
    from trainer.replica.backend import Choice

log = logging.getLogger(__name__)

TLS_HOME = Path("~/.config/motley/tls")
"""Where certificates are looked for when --tls is not given: one folder a process."""
NOT_RESTARTED = (InputError.exit_code, RefusedError.exit_code, 5, 0)


@dataclass(frozen=True)
class Placement:
    """Where this process runs and how it proves its identity."""

    gpus: list[str]
    backend: Backend
    threads: int | None
    rank: int | None
    tls_dir: str | None

    def certificates(self, name: str, address: str) -> Path | None:
        """Return the folder with this process's certificate; None for plaintext on loopback.

        `--tls` names the folder itself, or one with a folder for each process in it.
        """
        folder = self._tls_folder()
        if (folder / name).is_dir():
            return folder / name
        if self.tls_dir or os.environ.get("MOTLEY_TLS_DIR"):
            return folder
        if tls.is_loopback(address):
            return None
        raise InputError(
            f"{address} is reached by other machines, so TLS is needed: give --tls DIR, or put "
            f"certificates into {TLS_HOME}/{name} (`launch certificates` makes them)"
        )

    def worker_certificates(self, address: str) -> Path | None:
        """Return the folder with this worker's certificate; None for plaintext on loopback.

        A worker that is not told its rank takes the only one whose certificate it has.

        Raises:
            InputError: several ranks have certificates here, or none has off loopback.
        """
        if self.rank is not None:
            return self.certificates(f"rank-{self.rank}", address)
        folder = self._tls_folder()
        ranks = [path.name for path in folder.glob("rank-*") if path.is_dir()]
        if len(ranks) > 1 and not (folder / "cert.pem").is_file():
            raise InputError(f"{folder} has certificates of {len(ranks)} ranks: give --rank")
        return self.certificates(ranks[0] if len(ranks) == 1 else "rank-0", address)

    def _tls_folder(self) -> Path:
        return Path(self.tls_dir or os.environ.get("MOTLEY_TLS_DIR") or TLS_HOME).expanduser()


def run_local(config: RunConfig, run_id: str, place: Placement, notes: Sequence[str] = ()) -> int:
    """Train alone, without the network, through the same state machine and loop.

    Args:
        notes: on the settings, said once the data has been read.
    """
    from trainer.exchange.transport.local import LocalExchange
    from trainer.exchange.worker_session import Session

    refuse_if_held(Path(config.output))
    inputs = _read_inputs(config, run_id, notes)
    choice = _open(inputs, place)
    coordinator, journal = build.make_coordinator(inputs, 1, time.monotonic())
    request = build.make_request(inputs, choice, 0)
    session = Session(request, inputs.layout, config.exchange.codec)
    exchange = LocalExchange(coordinator, session, journal)
    worker = build.make_worker(inputs, choice, lambda: exchange)
    on_signal(exchange.interrupt)
    end = worker.run()
    return journal.close(end.exit_code, end.reason)


def run_coordinator(
    config: RunConfig,
    run_id: str,
    place: Placement,
    bind: str,
    expect_workers: int | None,
    notes: Sequence[str] = (),
) -> int:
    """Serve a run, with one local worker for each GPU named; for `notes` see `run_local`."""
    from trainer.exchange.transport.server import GradientServer

    address = tls.parse_address(bind, "--bind")
    folder = place.certificates("coordinator", address[0])
    if folder is not None:
        tls.require_run(folder, run_id)
    refuse_if_held(Path(config.output))
    expect = expect_workers or max(len(place.gpus), 1)
    inputs = _read_inputs(config, run_id, notes)
    coordinator, journal = build.make_coordinator(inputs, expect, time.monotonic())
    config = inputs.config
    del inputs  # a coordinator counts samples, it keeps none
    server = GradientServer(coordinator, journal, address, folder)
    with tempfile.TemporaryFile() as run_file:  # without a name: nothing is left by a kill
        run_file.write(config.to_yaml().encode())
        run_file.flush()
        local = _LocalWorkers(
            [
                _worker_command(run_file.fileno(), run_id, place, rank, gpu, _reachable(bind))
                for rank, gpu in enumerate(place.gpus)
            ],
            run_file.fileno(),
            server.halt,
        )
        try:
            return server.run(on_listening=local.start)
        finally:
            local.stop()


def load_worker(backend: str) -> None:
    """Import what `run_worker` needs on a backend."""
    import trainer.data.tokens
    import trainer.exchange.transport.client
    import trainer.loop
    import trainer.replica.backend

    if backend == "wgpu":
        import trainer.replica.wgpu.autotune
        import trainer.replica.wgpu.replica
        import trainer.replica.wgpu.selftest
    else:
        import trainer.replica.torch.replica  # noqa: F401 - loaded, not used


def run_worker(config: RunConfig, run_id: str, place: Placement, coordinator: str) -> int:
    """Join a run and work until it is over."""
    from trainer.exchange.transport.client import WorkerClient

    address = tls.parse_address(coordinator, "--coordinator")
    folder = place.worker_certificates(address[0])
    if folder is not None:
        tls.require_run(folder, run_id)
    inputs = build.read_inputs(config, run_id)
    choice = _open(inputs, place)

    def connect() -> WorkerClient:
        return WorkerClient(
            address,
            build.make_request(inputs, choice, place.rank),
            inputs.layout,
            codec=config.exchange.codec,
            folder=folder,
            patience=config.exchange.join_deadline,
        )

    worker = build.make_worker(inputs, choice, connect)
    on_signal(worker.interrupt)
    end = worker.run()
    log.info("the run is over for this worker: %s", end.reason)
    return end.exit_code


def _read_inputs(config: RunConfig, run_id: str, notes: Sequence[str]) -> build.RunInputs:
    inputs = build.read_inputs(config, run_id, log.info)
    for line in notes:
        log.info("%s", line)
    return inputs


def _open(inputs: build.RunInputs, place: Placement) -> Choice:
    """Return a replica, and say on what it computes and why not on an earlier backend."""
    choice = build.make_choice(inputs, place.backend, "".join(place.gpus), place.threads)
    log.info(
        "replica on %s%s", choice.replica.device, f" ({choice.reason})" if choice.reason else ""
    )
    return choice


class _LocalWorkers:
    """The workers that a coordinator with --gpus runs beside itself, restarted when they die.

    Args:
        commands: all read the open `run_file`.
        on_refused: called from any thread with why one cannot work as it was asked to.
    """

    def __init__(
        self,
        commands: list[list[str]],
        run_file: int,
        on_refused: Callable[[TrainerError], None],
    ) -> None:
        self._commands = commands
        self._run_file = run_file
        self._on_refused = on_refused
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # no worker is started once stopping has begun

    def start(self) -> None:
        for index in range(len(self._commands)):
            threading.Thread(target=self._keep, args=(index,), daemon=True).start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _keep(self, index: int) -> None:
        delay = 0.5
        environment = dict(os.environ)
        while True:
            began = time.monotonic()
            with self._lock:
                if self._stopping.is_set():
                    return
                process = subprocess.Popen(
                    self._commands[index], pass_fds=(self._run_file,), env=environment
                )
                self._processes[index] = process
            code = process.wait()
            if time.monotonic() - began > 60:  # it worked: this is no crash at every start
                delay = 0.5
            if code == InputError.exit_code and FALLBACK_VARIABLE not in environment:
                self._on_refused(InputError(f"worker {index} cannot start; it says why above"))
            if code in NOT_RESTARTED or self._stopping.wait(delay):
                return
            environment[FALLBACK_VARIABLE] = "1"
            log.warning("worker %d ended with %d, starting it again", index, code)
            delay = min(2 * delay, 30.0)


def _worker_command(
    run_file: int, run_id: str, place: Placement, rank: int, gpu: str, address: str
) -> list[str]:
    source = f"/dev/fd/{run_file}"
    command = [sys.executable, "-P", "-m", "trainer.cli", "finetune", "--config", source]
    command += ["--run-id", run_id, "--role", "worker", "--rank", str(rank), "--gpus", gpu]
    command += ["--coordinator", address, "--gpu-backend", place.backend]
    if place.threads:
        command += ["--threads", str(place.threads)]
    if place.tls_dir:
        command += ["--tls", place.tls_dir]
    return command


def _reachable(bind: str) -> str:
    """Return where a process of this machine finds what is bound to `bind`."""
    host, port = tls.parse_address(bind, "--bind")
    return f"127.0.0.1:{port}" if host == "0.0.0.0" else bind  # noqa: S104 - a comparison


def on_signal(interrupt: Callable[[str], None]) -> None:
    """Let SIGTERM and SIGINT ask for an end; what they call must be safe in a signal handler."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_, name=number.name: interrupt(f"stopped by {name}"))
