"""The roles of a training process: alone, coordinator, worker, rank."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.run import RunConfig
from trainer.config.script import Script
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.targets import has_bare_rest
from trainer.exchange.transport import tls
from trainer.model.output_folder import check_output
from trainer.model.shards import check_shards
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.planning.budget.ledger import SPEND_FILE
from trainer.run.composition import run as build
from trainer.run.composition.record import Guards, refuse_lost_checkpoints
from trainer.run.distributed.environment import silence_torch
from trainer.run.inputs import RunInputs, read_inputs
from trainer.system.backends import RequestedBackend
from trainer.system.errors import RESTARTED, BudgetStopError, InputError, TrainerError
from trainer.system.process.imports import speed_up_imports
from trainer.system.process.local_workers import LocalWorkers
from trainer.system.process.stop_signals import StopRequest, handle_stop_signals
from trainer.system.storage import lease
from trainer.tracking.notifier import Notifier, notify_of_failure
from trainer.tracking.trackers.table import check_trackers

if TYPE_CHECKING:
    from trainer.config.parallel import GroupStrategy
    from trainer.replica.backend import ReplicaChoice
    from trainer.run.distributed.environment import Environment

log = logging.getLogger(__name__)

TLS_HOME = Path("~/.config/motley/tls")
"""Where certificates are searched without --tls: one folder a process."""


@dataclass(frozen=True)
class Placement:
    """Where this process runs and how it proves its identity."""

    gpus: list[str]
    backend: RequestedBackend
    threads: int | None
    rank: int | None
    tls_dir: str | None
    strategy: GroupStrategy | None = None  # of a worker whose devices hold one replica together
    script: Script | None = None  # what task `script` runs, as this start named it

    def find_certificates(self, name: str, address: str) -> Path | None:
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

    def find_worker_certificates(self, address: str) -> Path | None:
        """Return the folder with this worker's certificate; None for plaintext on loopback.

        A worker without --rank takes the only rank whose certificate it has.

        Raises:
            InputError: several ranks have certificates here, or none has off loopback.
        """
        if self.rank is not None:
            return self.find_certificates(f"rank-{self.rank}", address)
        folder = self._tls_folder()
        ranks = [path.name for path in folder.glob("rank-*") if path.is_dir()]
        if len(ranks) > 1 and not (folder / "cert.pem").is_file():
            raise InputError(f"{folder} has certificates of {len(ranks)} ranks: give --rank")
        return self.find_certificates(ranks[0] if len(ranks) == 1 else "rank-0", address)

    def _tls_folder(self) -> Path:
        return Path(self.tls_dir or os.environ.get("MOTLEY_TLS_DIR") or TLS_HOME).expanduser()


def run_local(
    config: RunConfig,
    run_id: str,
    place: Placement,
    notes: Sequence[str] = (),
    notify: Sequence[str] = (),
) -> int:
    """Train in one process, without the network, with the same state machine and loop.

    Args:
        notes: on the settings, logged after the data has been read.
        notify: the command of this start that gets the run's events.
    """
    from trainer.exchange.transport.local import LocalExchange
    from trainer.exchange.worker.session import Session

    _check_output(config)
    with guard_run(config, run_id, notify) as guards:
        inputs = read_inputs(config, run_id, log.info, place.script)
        _record_inputs(inputs, notes, guards)
        choice = open_replica(inputs, place, coordinates=True)
        coordinator, recorder = build.make_coordinator(inputs, 1, time.monotonic(), guards)
        request = build.make_request(inputs, choice, 0)
        settings = config.exchange
        # In rounds a worker's second moment is its own.
        shared = None if settings.has_rounds else coordinator.training.state
        session = Session(request, inputs.layout, settings.codec, settings.has_rounds, shared)
        exchange = LocalExchange(coordinator, session, recorder)
        worker = build.make_worker(inputs, choice, lambda: exchange)
        interrupt_on_signals(exchange.interrupt)
        with recorder.closed_on_failure():  # such as of a script
            end = worker.run()
        finish = exchange.finish or end  # the coordinator's code: a worker did what it was asked to
        return recorder.close(finish.exit_code, finish.reason)


def run_coordinator(
    config: RunConfig,
    run_id: str,
    place: Placement,
    bind: str,
    expect_workers: int | None,
    notes: Sequence[str] = (),
    notify: Sequence[str] = (),
) -> int:
    """Serve a run, with one local worker for each GPU named; for the last two see `run_local`."""
    from trainer.exchange.transport.listener import bind_address
    from trainer.exchange.transport.reading_listener import ReadingListener
    from trainer.exchange.transport.server import GradientServer

    address = tls.parse_address(bind, "--bind")
    folder = place.find_certificates("coordinator", address[0])
    if folder is not None:
        tls.require_run(folder, run_id)
    _check_output(config)
    expect = expect_workers or max(len(place.gpus), 1)
    with (
        guard_run(config, run_id, notify) as guards,
        closing(bind_address(address, folder)) as bound,
    ):
        with ReadingListener(bound, run_id):
            inputs = read_inputs(config, run_id, log.info, place.script, computes=False)
            _record_inputs(inputs, notes, guards)
            coordinator, recorder = build.make_coordinator(inputs, expect, time.monotonic(), guards)
        config = inputs.config
        del inputs  # a coordinator counts samples and keeps none
        server = GradientServer(coordinator, recorder, bound)
        with tempfile.TemporaryFile() as run_file:  # unnamed: a kill leaves nothing
            run_file.write(config.to_yaml().encode())
            run_file.flush()
            local = LocalWorkers(run_file.fileno(), server.halt)

            def start_workers() -> None:
                fixed, here = (run_file.fileno(), run_id, place), _local_address(bind, server.port)
                local.start(
                    [build_worker_command(*fixed, *each, here) for each in enumerate(place.gpus)]
                )

            try:
                return server.run(on_listening=start_workers)
            finally:
                local.stop()


def run_distributed(
    config: RunConfig,
    run_id: str,
    place: Placement,
    environment: Environment,
    notes: Sequence[str] = (),
    notify: Sequence[str] = (),
) -> int:
    """Train as one of equal processes, without a coordinator; for the last two see `run_local`."""
    config.parallel.count_copies(environment.world_size)
    config.exchange.check_worker_count(environment.world_size)
    first = environment.rank == 0
    if first:
        _check_output(config)
    with guard_run(config, run_id, notify) if first else nullcontext() as guards:
        if guards is None:
            logging.getLogger().setLevel(logging.WARNING)
        silence_torch()
        with speed_up_imports("torch"):
            from trainer.run.composition.distributed import make_distributed
            from trainer.run.distributed.rendezvous import Rendezvous
            from trainer.run.distributed.run import run_rank
        with Rendezvous(environment, config.exchange.join_deadline) as meeting:
            inputs = read_inputs(config, run_id, None if guards is None else log.info)
            if guards is not None:
                _record_inputs(inputs, notes, guards)
            check_shards(inputs.model_dir, inputs.config)
            config.parallel.pipeline.check_layers(inputs.layout.num_layers)
        stop = StopRequest()
        interrupt_on_signals(stop.request)
        code = run_rank(
            inputs,
            environment,
            backend=place.backend,
            gpu="".join(place.gpus),
            threads=place.threads,
            stop=stop,
            meet=meeting.wait_for_store,
            make=partial(make_distributed, inputs, environment, guards),
        )
        if code == BudgetStopError.exit_code and environment.by_torchrun:
            log.info("exiting with 0, not %d: torchrun would restart a failed run", code)
            return 0
        return code


def run_worker(config: RunConfig, run_id: str, place: Placement, coordinator: str) -> int:
    """Join a run and work until it is over."""
    from trainer.exchange.transport.client import WorkerClient
    from trainer.exchange.transport.reading_reporter import ReadingReporter

    address = tls.parse_address(coordinator, "--coordinator")
    folder = place.find_worker_certificates(address[0])
    if folder is not None:
        tls.require_run(folder, run_id)
    opens = _prepare_opener(place)  # before a thread is started: a group forks
    with ReadingReporter(address, run_id, place.rank, folder):
        inputs = read_inputs(config, run_id, script=place.script)
    choice = opens(inputs)

    def connect() -> WorkerClient:
        return WorkerClient(
            address,
            build.make_request(inputs, choice, place.rank),
            inputs.layout,
            codec=config.exchange.codec,
            folder=folder,
            patience=config.exchange.join_deadline,
            rounds=config.exchange.has_rounds,
        )

    worker = build.make_worker(inputs, choice, connect)
    interrupt_on_signals(worker.interrupt)
    end = worker.run()
    log.info("run finished: %s", end.reason)
    return end.exit_code


def _check_output(config: RunConfig) -> None:
    check_output(Path(config.output))
    lease.refuse_if_held(Path(config.output))
    refuse_lost_checkpoints(config)


@contextmanager
def guard_run(
    config: RunConfig, run_id: str, notify: Sequence[str] = (), *, total_steps: int = 0
) -> Iterator[Guards]:
    """Count the run's cost and tell of its events from here on, until the block ends.

    Args:
        notify: the command that gets them.

    Raises:
        InputError: what the settings `budget` or `tracking`, or the command, need is not there.
    """
    check_trackers(config.tracking)
    notifier = Notifier(notify, run_id, str(Path(config.output).absolute()))
    watch, budget, every = None, config.budget, config.checkpoint.every
    if budget is not None:
        ledger = Path(budget.ledger or Path(config.output) / SPEND_FILE)
        watch = BudgetWatch(budget, run_id, ledger, every=every, total_steps=total_steps)
    ended = False
    try:
        with notify_of_failure(notifier):
            yield Guards(watch, notifier)
        ended = True
    except TrainerError as error:
        ended = error.exit_code not in RESTARTED
        raise
    finally:
        if watch is not None:  # the recorder of a run that had begun has closed it
            watch.close(ended=ended)


def _record_inputs(inputs: RunInputs, notes: Sequence[str], guards: Guards) -> None:
    if guards.budget is not None:
        guards.budget.set_total_steps(inputs.plan.total_steps)
    for line in notes:
        log.info("%s", line)


def _prepare_opener(place: Placement) -> Callable[[RunInputs], ReplicaChoice]:
    if place.strategy is None:
        return partial(open_replica, place=place)
    from trainer.run.composition.group import start_group

    return start_group(place.backend, place.gpus, place.strategy, place.threads)


def open_replica(
    inputs: RunInputs, place: Placement, *, moments: bool = False, coordinates: bool = False
) -> ReplicaChoice:
    """Open a replica on the first backend that works; log which, and why no earlier one.

    Args:
        moments, coordinates: see `choose_replica`.

    Raises:
        InputError: the model cannot be used, or does not fit.
    """
    from trainer.replica.backend import choose_replica, format_reason

    train = inputs.train
    choice = choose_replica(
        place.backend,
        "".join(place.gpus),
        inputs.model_dir,
        inputs.config,
        inputs.layout,
        place.threads,
        rest=isinstance(train, LogitsFolder) and has_bare_rest(train.description.scheme),
        moments=moments,
        coordinates=coordinates,
        reference=inputs.reference,
        script=inputs.script,
    )
    layers = f", {choice.residents}" if choice.residents else ""
    log.info("replica on %s%s%s", choice.replica.device, format_reason(choice.reason), layers)
    return choice


def build_worker_command(
    run_file: int, run_id: str, place: Placement, rank: int, gpu: str, address: str
) -> list[str]:
    """Return what starts a worker on a GPU of this host; it inherits the file of the run."""
    source = f"/dev/fd/{run_file}"
    command = [sys.executable, "-P", "-m", "trainer.cli", "finetune", "--config", source]
    command += ["--run-id", run_id, "--role", "worker", "--rank", str(rank), "--gpus", gpu]
    command += ["--coordinator", address, "--gpu-backend", place.backend]
    if place.threads:
        command += ["--threads", str(place.threads)]
    if place.tls_dir:
        command += ["--tls", place.tls_dir]
    if place.script:
        command += ["--script", str(place.script.path), "--script-digest", place.script.digest]
    return command


def _local_address(bind: str, port: int) -> str:
    """Return the address of `bind` for processes on this machine, once `port` is listening."""
    host, _, _ = bind.rpartition(":")
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 - a comparison


def interrupt_on_signals(interrupt: Callable[[str], None]) -> None:
    """Call `interrupt` on SIGTERM, SIGINT and SIGHUP; it must be safe in a signal handler."""
    handle_stop_signals(lambda number: interrupt(f"stopped by {number.name}"))
