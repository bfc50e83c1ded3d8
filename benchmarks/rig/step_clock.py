"""Times, losses and peak memory of training steps, and a profile of the last ones."""

from __future__ import annotations

import resource
import time
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

WARMUP = 2
"""Steps before those that count: what is allocated or chosen once is there afterwards."""
PROFILED = 3
LARGEST = 20
"""Operations or kernels that a profile names."""
_WAITS = ("Synchronize", "aten::_local_scalar_dense", "aten::is_nonzero")
"""Calls in which the host waits for the card."""


class StepClock:
    """Measures steps from `begin` to `end`, which both wait for the device.

    Args:
        steps: that count; `total` are to be run.
        profiled: steps after them run under torch's profiler and are not timed.
    """

    def __init__(self, device: torch.device, steps: int, *, profiled: bool) -> None:
        self.total = WARMUP + steps + PROFILED * profiled
        self.losses: list[float] = []
        self._device, self._steps, self._profiled = device, steps, profiled
        self._seconds: list[float] = []
        self._began = 0.0
        self._peak: int | None = None
        self._profile: Any = None

    def begin(self) -> None:
        """Start a step."""
        done = len(self._seconds)
        if done == WARMUP and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._profiled and done == WARMUP + self._steps:
            self._peak = self._peak_bytes()
            card = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *card])
            self._profile.__enter__()
        self._synchronize()
        self._began = time.perf_counter()

    def end(self) -> None:
        """End the step."""
        self._synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        if self._profile is not None and len(self._seconds) == self.total:
            self._profile.__exit__(None, None, None)

    def figures(self) -> dict[str, Any]:
        """Return what was measured."""
        measured = self._seconds[WARMUP : WARMUP + self._steps]
        found = {
            "first_seconds": self._seconds[0],
            "seconds": measured,
            "losses": self.losses[: WARMUP + self._steps],
            "peak_bytes": self._peak_bytes() if self._peak is None else self._peak,
            "peak_of": "card" if self._device.type == "cuda" else "process",
        }
        return found if self._profile is None else {**found, "profile": self._summary()}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peak_bytes(self) -> int:
        """Return the most that was allocated on the card, else the process's largest resident set.

        The latter has libraries and mapped files in it.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _summary(self) -> dict[str, Any]:
        """Return, for a step, the largest consumers of the device's time and the host's waits."""
        rows = self._profile.key_averages()
        kind = "device" if self._device.type == "cuda" else "cpu"
        rows = sorted(rows, key=lambda row: -getattr(row, f"self_{kind}_time_total"))
        waits, waited = Counter[str](), Counter[str]()
        for row in rows:
            if any(name in row.key for name in _WAITS):
                waits[row.key] += row.count / PROFILED
                waited[row.key] += row.self_cpu_time_total / PROFILED / 1e6
        return {
            "steps": PROFILED,
            f"{kind}_seconds": sum(_seconds(row, kind) for row in rows),
            "largest": [
                {"name": row.key[:120], "calls": row.count / PROFILED, "seconds": seconds}
                for row in rows[:LARGEST]
                if (seconds := _seconds(row, kind))
            ],
            "host_waits": {
                name: {"calls": count, "seconds": waited[name]} for name, count in waits.items()
            },
        }


def _seconds(row: Any, kind: str) -> float:
    return getattr(row, f"self_{kind}_time_total") / PROFILED / 1e6
