"""Run the budget guard: read clocks and sensors, and record the spending."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.budget import BudgetConfig
from trainer.planning.budget.accrual import Accrual
from trainer.planning.budget.guard import STOPPING, BudgetGuard
from trainer.planning.budget.ledger import SpendLedger, SpendRecord, earlier_attempts
from trainer.planning.budget.power import PowerMeter

log = logging.getLogger(__name__)

RECORD_EVERY = 60.0
"""Seconds between lines; what a killed process did not write, the next attempt counts."""
LATEST_RETURN = 900.0
"""Seconds after which the next attempt does not count a killed one's hosts as kept meanwhile, but
only the `RECORD_EVERY` that the killed one may not have written."""
FRESH = 120.0
"""Seconds for which a worker's reading of its host's power holds."""


class BudgetWatch:
    """Counts the cost of a run, and decides when it must stop. Thread-safe.

    Raises:
        InputError: no host has a price, or the ledger cannot be used.
    """

    def __init__(
        self,
        budget: BudgetConfig,
        run_id: str,
        ledger: Path,
        *,
        every: int = 0,
        total_steps: int = 0,
        stopping: float = STOPPING,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        meter: PowerMeter | None = None,
    ) -> None:
        budget.check_prices()
        self.budget = budget
        self._run_id = run_id
        self._ledger = SpendLedger(ledger)
        self._clock, self._wall = clock, wall
        self._lock = threading.RLock()
        self._closed = False
        self._meter = meter or PowerMeter()
        before = earlier_attempts(self._ledger.read_records(), run_id, budget.currency)
        now, today = clock(), wall()
        away = 0.0 if before.until is None else today - before.until
        # The hosts of an attempt that was killed kept running: their time counts.
        back_soon = not before.ended and 0 <= away <= LATEST_RETURN
        kept = away if back_soon else 0.0 if before.ended else min(max(0.0, away), RECORD_EVERY)
        idle = today - before.progress_at if back_soon and before.progress_at is not None else 0.0
        # A host whose power only sensors tell went on at the power of its last line.
        rates = [
            host.model_copy(update={"watts": before.watts.get(host.name)})
            if host.watts is None
            else host
            for host in budget.hosts
        ]
        self._accrual = Accrual(rates, now - kept)
        self._guard = BudgetGuard(
            budget,
            self._accrual,
            before=before.money,
            every=every,
            total_steps=total_steps,
            idle_since=now - max(0.0, idle),
            stopping=stopping,
        )
        self._step = 0
        self._watts: dict[str, tuple[float, float]] = {}
        self._hosts = {rank: host.name for host in budget.hosts for rank in host.ranks}
        self._recorded_at = now
        self._written = True
        self._unknown = {rate.name for rate in rates if rate.watts is None and rate.price_kwh}
        """Hosts of whose power no line tells yet: the cost of a killed attempt would be lost."""
        self._meter.recent_watts()
        self._accrual.advance(now, {})
        # Before anything costs: an attempt that is killed at once has begun all the same.
        self._record_spend(begin=True)

    def record_resumption(self, step: int) -> None:
        """Note that the run goes on after so many steps."""
        with self._lock:
            self._step = step
            self._guard.record_resumption(step)

    def record_step(self, step: int, watts: Mapping[int, float]) -> None:
        """Note a step, which is progress, and the readings of power that came with it, by rank."""
        with self._lock:
            now = self._clock()
            self._step = step
            self._guard.record_step(step, now)
            for rank, reading in watts.items():
                if host := self._hosts.get(rank):
                    self._watts[host] = (now, reading)

    def set_total_steps(self, total_steps: int) -> None:
        """Note the steps of the run, where they were not known when it began."""
        with self._lock:
            self._guard.set_total_steps(total_steps)

    def record_progress(self) -> None:
        """Note something that was completed, other than a step."""
        with self._lock:
            self._guard.record_progress(self._clock())

    def record_save(self, seconds: float) -> None:
        """Note how long a checkpoint took: a clean end takes one more."""
        self._guard.record_save(seconds)

    @property
    def ending(self) -> str | None:
        """Why the run must stop now; None while it need not. Call it every second."""
        with self._lock:
            now = self._clock()
            own = self._meter.recent_watts()
            if own is not None and self.budget.hosts:
                self._watts[self.budget.hosts[0].name] = (now, own)
            self._accrual.advance(now, self._present_rates(now))
            fresh = self._unknown & self._watts.keys()
            if now - self._recorded_at >= RECORD_EVERY or fresh:
                self._unknown -= fresh
                self._recorded_at = now
                self._record_spend()
            return self._guard.check_budget(now)

    def _present_rates(self, now: float) -> dict[str, float]:
        return {host: watts for host, (at, watts) in self._watts.items() if now - at <= FRESH}

    @property
    def status(self) -> dict[str, Any]:
        """The cost of the run so far, for status.json."""
        with self._lock:
            return {
                "spent": round(self._guard.spent, 6),
                "ceiling": self.budget.ceiling,
                "currency": self.budget.currency,
                "hourly_cost": round(self._accrual.an_hour, 6),
                "measured_hosts": sorted(self._present_rates(self._clock())),
            }

    def close(self, *, ended: bool = True) -> None:
        """Record what is not yet recorded; `ended`: cleanly, so that no time is counted on.

        The first call counts.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            now = self._clock()
            self._accrual.advance(now, self._present_rates(now))
            self._record_spend(end=ended)

    def _record_spend(self, *, begin: bool = False, end: bool = False) -> None:
        """Append a line for each host; those that the disk does not take stay for the next time."""
        parts, until = self._accrual.take_spend(), self._wall()
        parts = [part for part in parts if part.seconds or begin or end]
        if not parts:
            return
        lines = [
            SpendRecord(
                run_id=self._run_id,
                host=part.host,
                until=until,
                seconds=part.seconds,
                kwh=part.kwh,
                measured_seconds=part.measured,
                cost=part.money,
                currency=self.budget.currency,
                step=self._step,
                is_final=end,
            )
            for part in parts
        ]
        try:
            self._ledger.append_records(lines)
        except OSError as error:
            self._accrual.put_back(parts)
            if self._written:
                log.error(
                    "ALARM: %s: not written: %s; Motley tries again, and the ceiling still applies",
                    self._ledger.path,
                    error.strerror or error,
                )
            self._written = False
        else:
            self._written = True
