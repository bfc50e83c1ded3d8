"""The GradientServer: sockets and TLS around the coordinator's state machine."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec

from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import (
    Action,
    ApplyUpdate,
    Close,
    Emit,
    Finish,
    Save,
    Send,
    Step,
)
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.messages import JoinRefused
from trainer.exchange.protocol.wire import Frame, run_tag
from trainer.exchange.transport import tls
from trainer.exchange.transport.event_loop import call_in_loop
from trainer.exchange.transport.link import FLUSH, Link
from trainer.exchange.transport.listener import BoundAddress, Listener
from trainer.exchange.transport.recorder import Recorder
from trainer.exchange.transport.refusals import RefusalReporter
from trainer.exchange.transport.same_host import SameHostListener, make_socket_name
from trainer.system.errors import BudgetStopError, ProtocolError, TrainerError
from trainer.system.malloc import return_freed_arrays
from trainer.system.process.priority import raise_thread_priority
from trainer.system.process.stop_signals import handle_stop_signals

log = logging.getLogger(__name__)

_STEPS_BEHIND = 8
_POLL_INTERVAL = 0.001
"""Seconds between two looks at what is still to be sent."""
_Words = ParamSpec("_Words")
_Callback = Callable[Concatenate["GradientServer", _Words], None]


def _ends_the_run_if_it_fails(callback: _Callback[_Words]) -> _Callback[_Words]:
    """Let a defect in a callback end the run: asyncio would log it, and serve on without sense."""

    @functools.wraps(callback)
    def call_guarded(self: GradientServer, /, *words: _Words.args, **named: _Words.kwargs) -> None:
        try:
            callback(self, *words, **named)
        except Exception as error:
            self.fail(error)

    return call_guarded


class GradientServer:
    """Runs one coordinator on one address until its run is over."""

    def __init__(self, coordinator: Coordinator, recorder: Recorder, bound: BoundAddress) -> None:
        self._coordinator = coordinator
        self._recorder = recorder
        self._bound = bound
        self._run = run_tag(coordinator.membership.job.run_id)
        blocks = len(coordinator.training.policy.wire_layout.blocks)
        self._max_queued = _STEPS_BEHIND * (blocks + 4)
        self._refusals = RefusalReporter(recorder.emit)
        self._listener: Listener | None = None
        self._links: dict[int, Link] = {}
        self._numbers: dict[Link, int] = {}
        self._count = 0
        self._finished: asyncio.Future[Finish] | None = None

    def run(self, on_listening: Callable[[], None] = lambda: None) -> int:
        """Serve until the run is over and return its exit code.

        Raises:
            InputError: another process listens at the address.
        """
        return_freed_arrays()
        with raise_thread_priority():
            return asyncio.run(self._serve_run(on_listening))

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return self._bound.port

    async def _serve_run(self, on_listening: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        address = f"{self._bound.host}:{self.port}"
        with ExitStack() as doors:
            self._open_listeners(doors)
            handle_stop_signals(
                lambda number: call_in_loop(loop, self._stop_run, f"stopped by {number.name}")
            )
            self._recorder.emit({"event": "listening", "address": address})
            on_listening()
            ticker = asyncio.create_task(self._run_ticker())
            try:
                finish = await self._finished
            finally:
                ticker.cancel()
        await self._flush_links()
        return await asyncio.to_thread(self._recorder.close, finish.exit_code, finish.reason)

    def _open_listeners(self, doors: ExitStack) -> None:
        """Listen, on TCP last: a worker of this host keeps the first transport that accepts it."""
        listener = Listener(self._bound, self._make_link, self._refusals)
        doors.callback(listener.close)
        self._listener = listener
        if same_host := self._listen_on_this_host():
            doors.callback(same_host.close)
        listener.start()

    def _listen_on_this_host(self) -> SameHostListener | None:
        training = self._coordinator.training
        if not training.config.exchange.shared_memory:
            return None
        sizes = training.policy.codec.compute_largest_sizes()
        try:
            made = SameHostListener(make_socket_name(self.port, self._run), sizes, self._make_link)
        except OSError as error:
            log.warning("no shared memory, workers of this host use TCP: %s", error)
            return None
        training.memory.lend = made.averages.lend_buffer
        made.start()
        return made

    def halt(self, error: TrainerError) -> None:
        """End the run with an error's exit code; to be called from any thread."""
        assert self._finished is not None
        call_in_loop(self._finished.get_loop(), self._halt_run, error)

    def fail(self, error: Exception) -> None:
        """End the run after a defect: loudly, and with a last checkpoint if that is possible."""
        assert self._finished is not None
        if self._finished.done():
            log.error("an internal error after the end of the run", exc_info=error)
            return
        reason = f"a defect in Motley: {type(error).__name__}: {error}"
        log.critical("the run ends: %s", reason, exc_info=error)
        try:
            self._perform_actions(self._coordinator.fail(reason))
        except Exception:
            log.exception("the final checkpoint could not be saved")
        if not self._finished.done():
            self._finished.set_result(Finish(1, reason))

    async def _run_ticker(self) -> None:
        interval = self._coordinator.training.config.exchange.heartbeat / 4
        while True:
            await asyncio.sleep(interval)
            self._on_tick()

    @_ends_the_run_if_it_fails
    def _on_tick(self) -> None:
        for link in list(self._links.values()):
            link.poll()
        self._perform_actions(self._coordinator.tick(time.monotonic()))
        if ending := self._recorder.ending:
            self._stop_run(ending, BudgetStopError.exit_code)
        if failure := self._recorder.failure:
            self._perform_actions(self._coordinator.halt(failure))

    async def _flush_links(self) -> None:
        """Wait until the last messages are sent, a bounded time."""
        deadline = time.monotonic() + FLUSH
        while self._links and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for link in list(self._links.values()):
            link.abort("the run is over")

    @_ends_the_run_if_it_fails
    def _halt_run(self, error: TrainerError) -> None:
        self._perform_actions(self._coordinator.halt(error))

    @_ends_the_run_if_it_fails
    def _stop_run(self, reason: str, exit_code: int = 0) -> None:
        self._perform_actions(self._coordinator.stop(reason, time.monotonic(), exit_code))

    def _make_link(self) -> Link:
        return Link(
            self._run,
            opened=self._on_opened,
            frame=self._on_frame,
            on_bytes=self._on_bytes,
            closed=self._on_closed,
            max_queued=self._max_queued,
            incompatible=self._on_incompatible,
        )

    @_ends_the_run_if_it_fails
    def _on_opened(self, link: Link) -> None:
        try:
            run_id = self._coordinator.membership.job.run_id
            chain = link.certificates
            certified = tls.read_certified_rank(chain, run_id) if chain else None
        except RefusalError as refusal:
            certified = refusal
        except ProtocolError as error:
            self._refusals.report({"event": "refused", "reason": f"{link.peer}: {error}"})
            link.abort(str(error))
            return
        self._count += 1
        self._links[self._count] = link
        self._numbers[link] = self._count
        self._perform_actions(
            self._coordinator.add_connection(self._count, certified, time.monotonic())
        )

    @_ends_the_run_if_it_fails
    def _on_frame(self, link: Link, frame: Frame) -> None:
        number = self._numbers[link]
        self._perform_actions(self._coordinator.receive_frame(number, frame, time.monotonic()))
        if not link.admitted and self._coordinator.membership.find_member(number):
            link.accept_tensors()
            self._tcp_listener.admit_link(link)

    @_ends_the_run_if_it_fails
    def _on_bytes(self, link: Link) -> None:
        if number := self._numbers.get(link):
            self._coordinator.record_activity(number, time.monotonic())

    @_ends_the_run_if_it_fails
    def _on_incompatible(self, link: Link, reason: str) -> None:
        """Refuse a peer of another version or run; its reader sees at least our header."""
        self._refusals.report({"event": "refused", "reason": f"{link.peer}: {reason}"})
        link.send([JoinRefused(reason=reason, retry=False).to_frame(0)])

    @_ends_the_run_if_it_fails
    def _on_closed(self, link: Link, reason: str) -> None:
        self._tcp_listener.forget_link(link)
        number = self._numbers.pop(link, None)
        if number is not None:
            del self._links[number]
            self._perform_actions(
                self._coordinator.remove_connection(number, reason, time.monotonic())
            )

    @property
    def _tcp_listener(self) -> Listener:
        assert self._listener is not None
        return self._listener

    def _perform_actions(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=number, frames=frames, if_idle=if_idle):
                    link = self._links.get(number)
                    if link and (link.is_idle or not if_idle):
                        link.send(frames)
                case Close(link=number, reason=reason, notified=told):
                    if link := self._links.get(number):
                        link.close(reason, notified=told)
                case ApplyUpdate():
                    self._apply_when_sent()
                case Save():
                    self._recorder.save(action)
                case Step():
                    self._recorder.log_step(action)
                case Emit(event=event):
                    self._emit_event(event)
                case Finish():
                    assert self._finished is not None
                    if not self._finished.done():
                        self._finished.set_result(action)

    @_ends_the_run_if_it_fails
    def _apply_when_sent(self) -> None:
        """Apply the update once the averages are sent: before that the wire would wait for it."""
        if all(link.is_idle for link in self._links.values()):
            self._perform_actions(self._coordinator.apply_update(time.monotonic()))
        else:
            asyncio.get_running_loop().call_later(_POLL_INTERVAL, self._apply_when_sent)

    def _emit_event(self, event: dict[str, Any]) -> None:
        tell = self._refusals.report if event["event"] == "refused" else self._recorder.emit
        tell(event)
