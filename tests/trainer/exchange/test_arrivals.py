"""Workers that report what they read before they join: awaited, bounded, and named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from trainer.exchange.coordinator.pending_connections import JOIN_REQUEST_TIMEOUT, MAX_READERS
from trainer.exchange.protocol.actions import Action, Close, Emit, Finish, Send
from trainer.exchange.protocol.members import Certified, RefusalError
from trainer.exchange.protocol.messages import Heartbeat, ReadProgress, Shutdown, parse_message
from trainer.exchange.protocol.wire import Frame, MessageType

DEADLINE = 20.0


@dataclass
class Run:
    """A coordinator that waits for two workers, and what it does about readers."""

    cluster: SimulatedCluster
    closed: dict[int, str] = field(default_factory=dict)
    ended: dict[int, Shutdown] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    finish: Finish | None = None

    def connect(self, link: int, certified: Certified = None) -> None:
        self._perform(self.cluster.machine.add_connection(link, certified, self.cluster.now))

    def report(self, link: int, count: int, rank: int | None = 1, host: str = "box") -> None:
        line = f"reading a.jsonl: {count} of 900 rows"
        reading = ReadProgress(rank=rank, host=host, count=count, description=line)
        self.receive(link, Heartbeat(read_progress=reading).to_frame(0))

    def receive(self, link: int, frame: Frame) -> None:
        self._perform(self.cluster.machine.receive_frame(link, frame, self.cluster.now))

    def pass_time(self, seconds: float) -> None:
        self.cluster.now += seconds
        self._perform(self.cluster.machine.tick(self.cluster.now))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=link, frames=frames):
                    for frame in frames:
                        if frame.type is MessageType.SHUTDOWN:
                            message = parse_message(frame)
                            assert isinstance(message, Shutdown)
                            self.ended[link] = message
                case Close(link=link, reason=reason):
                    self.closed[link] = reason
                case Emit(event=event):
                    self.events.append(event)
                case Finish():
                    self.finish = action
                case _:
                    raise AssertionError(action)


@pytest.fixture
def run() -> Run:
    problem = ExactProblem(exchange__join_deadline=DEADLINE, exchange__lost_after=12.0)
    return Run(SimulatedCluster(problem, workers=0, expect=2))


def test_the_run_waits_while_a_count_grows_and_then_names_who_got_stuck(run: Run) -> None:
    run.connect(7)
    for second in range(0, 100, 4):
        run.report(7, second)
        run.pass_time(4)
    assert run.finish is None
    for _ in range(5):
        run.report(7, 96)
        run.pass_time(4)
    assert run.finish is not None
    assert run.finish.exit_code == 3
    says = "rank 0, 1 did not join within 20 s; rank 1 on box stalled at reading a.jsonl: "
    assert run.finish.reason.startswith(f"{says}96 of 900 rows: check its log")
    assert run.ended[7].reason == run.finish.reason
    assert run.ended[7].exit_code == 3
    assert not run.events, "one line is enough"


def test_a_reader_that_hangs_is_ended_while_the_run_waits_for_another(run: Run) -> None:
    run.connect(7)
    run.connect(8)
    for second in range(0, 24, 4):
        run.report(7, 5)
        run.report(8, second, rank=0)
        run.pass_time(4)
    assert run.finish is None
    reason = "no progress for 20 s: rank 1 on box stalled at reading a.jsonl: 5 of 900 rows"
    assert run.ended[7].reason.startswith(reason)
    assert run.ended[7].exit_code == 3
    assert [(event["event"], event["rank"]) for event in run.events] == [("refused", 1)]
    assert 8 not in run.closed


def test_to_connect_again_and_again_is_no_progress(run: Run) -> None:
    for link in range(8):
        run.connect(link)
        run.report(link, link + 1)
        run.pass_time(JOIN_REQUEST_TIMEOUT - 1)
        run.cluster.machine.remove_connection(link, "it closed", run.cluster.now)
    assert run.finish is not None


def test_a_reader_that_falls_silent_is_closed(run: Run) -> None:
    run.connect(7)
    run.report(7, 1)
    run.pass_time(JOIN_REQUEST_TIMEOUT + 1)
    assert run.closed == {7: "no JoinRequest within 5 s"}


def test_readers_of_a_run_that_ends_end_too(run: Run) -> None:
    run.connect(7)
    run.report(7, 1)
    run._perform(run.cluster.machine.stop("stopped by SIGTERM", run.cluster.now))
    run.pass_time(1)
    assert run.ended[7].exit_code == 0
    assert run.ended[7].reason == "stopped by SIGTERM"


def test_readers_are_few_and_one_a_rank(run: Run) -> None:
    for link in range(MAX_READERS):
        run.connect(link)
        run.report(link, 1, rank=link)
    run.connect(100)
    run.report(100, 1, rank=100)
    assert run.closed == {100: f"{MAX_READERS} workers already report what they read"}
    run.cluster.machine.remove_connection(0, "it closed", run.cluster.now)
    run.connect(101)
    run.report(101, 1, rank=3)
    assert run.closed[101] == "rank 3 already reports what it reads"


def test_only_a_certificate_of_the_run_holds_a_connection_and_it_says_the_rank(run: Run) -> None:
    run.connect(7, RefusalError("the worker's certificate is not valid any more"))
    run.report(7, 1)
    assert run.closed == {7: "the worker's certificate is not valid any more"}
    run.connect(8, 0)
    run.report(8, 1, rank=5)
    run.pass_time(4)
    run.report(8, 2, rank=5)
    for _ in range(6):
        run.report(8, 2)
        run.pass_time(4)
    assert run.finish is not None
    assert "rank 0 on box stalled" in run.finish.reason


@pytest.mark.parametrize(
    "reading",
    [
        b'{"read_progress":{"rank":0,"host":"h","count":-1,"description":"x"}}',
        b'{"read_progress":{"rank":0,"host":"h","count":9223372036854775808,"description":"x"}}',
        b'{"read_progress":{"rank":0,"host":"h","count":1.5,"description":"x"}}',
        b'{"read_progress":{"rank":65536,"host":"h","count":1,"description":"x"}}',
        b'{"read_progress":{"rank":0,"host":"h\\n","count":1,"description":"x"}}',
        b'{"read_progress":{"rank":0,"host":"h","count":1,"description":"' + b"x" * 301 + b'"}}',
        b'{"read_progress":{"rank":0,"host":"h","count":1,"description":"x","more":1}}',
        b'{"read_progress":{"rank":0,"host":"h","count":1}}',
        b'{"read_progress":null}',
        b"{}",
    ],
)
def test_what_is_no_report_ends_the_connection(run: Run, reading: bytes) -> None:
    run.connect(7)
    run.receive(7, Frame(MessageType.HEARTBEAT, reading))
    assert "HEARTBEAT" in run.closed[7]


def test_a_member_does_not_report_what_it_reads(run: Run) -> None:
    run.connect(7)
    run.receive(7, join_request(0).to_frame(0))
    assert 7 not in run.closed
    reading = ReadProgress(rank=0, host="h", count=1, description="x")
    generation = run.cluster.machine.membership.generation
    run.receive(7, Heartbeat(read_progress=reading).to_frame(generation))
    assert run.closed[7] == "HEARTBEAT is not for the coordinator"
