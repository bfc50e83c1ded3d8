"""What must hold after a soak. Pure: each check can fail, and says what is wrong."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.faults import Injection
from tests.soak.recovery import Recovery
from tests.soak.timeline import Usage

TOLERANCE, ROUNDS_TOLERANCE = 0.01, 0.2
"""By how much the loss may differ, as a share of it: F-DP-005. Rounds are another way: without any
fault 0.12 was measured, in the second epoch."""
LONGEST = 60.0
"""Seconds after the end of a fault within which a step must be committed."""
LEAST_INJECTED = 0.9
"""Share of the drawn faults that must have happened: a soak with less says little."""
WARM, LONG_LIVED = 90.0, 240.0
"""Seconds until a process has what it needs, and from which on its growth says something."""
MEMORY_GROWTH, DESCRIPTOR_GROWTH, THREAD_GROWTH = 16 * 2**20, 4, 2
"""What a process may hold more at the end of its life than in its first third."""
_UNFINISHED = re.compile(r"^\..*|.*\.tmp$|.*~$|ballast$")
_LEASE = re.compile(r"^\.lease-\d+$")
"""The newest lease of a folder stays: its number is what the next one counts on from."""
_TORCH_OWN = re.compile(r"^torchinductor_")
"""A folder that torch makes once for a user."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    detail: str


def ledger(steps: Sequence[Mapping[str, Any]], samples: int, batch: int) -> Check:
    """F-DP-002: every step is there, and has each of its samples exactly once."""
    numbers = [step["step"] for step in steps]
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        gap = next((i + 1 for i, n in enumerate(numbers) if n != i + 1), len(numbers) + 1)
        return Check("ledger", False, f"step {gap} is missing or comes twice, of {len(numbers)}")
    for step in steps:
        first = (step["step"] - 1) * batch % samples
        taken = [at for _, start, stop in step["sample_ranges"] for at in range(start, stop)]
        if sorted(taken) != list(range(first, min(first + batch, samples))):
            return Check("ledger", False, f"step {step['step']}: samples {step['sample_ranges']}")
    epochs = len(steps) * batch / samples
    return Check("ledger", True, f"{len(steps)} steps, {epochs:.1f} epochs, each sample once")


def proofs(events: Sequence[Mapping[str, Any]], last_step: int, saved_weights: str) -> Check:
    """F-DP-001: all workers held the same weights whenever they proved them, and at the end."""
    diverged = [event for event in events if event["event"] == "diverged"]
    if diverged:
        return Check("proofs", False, f"rank {diverged[0]['rank']} held other weights")
    proven = [event for event in events if event["event"] == "verified"]
    if not proven:
        return Check("proofs", False, "not one proof")
    last = proven[-1]
    if last["at_step"] != last_step or last["digest"] != saved_weights:
        what = f"the last proof is of step {last['at_step']}, the last state of step {last_step}"
        return Check(
            "proofs", False, f"{what}; weights {last['digest'][:12]}, {saved_weights[:12]}"
        )
    return Check("proofs", True, f"{len(proven)} proofs, all equal; the last state is proved")


def kept_running(given_up: Sequence[str]) -> Check:
    """No process was given up on: whatever is disturbed for a while is started again."""
    return Check("kept running", not given_up, "; ".join(given_up) or "every process")


def saved(committed: int, checkpoint: int, exit_code: int, errors: str) -> Check:
    """`down` ends well and keeps every step that was committed."""
    if exit_code != 0:
        return Check("down", False, f"ended with {exit_code}: {' '.join(errors.split())}")
    lost = committed - checkpoint
    detail = f"step {committed} committed, step {checkpoint} saved"
    return Check("down", lost == 0, detail)


def loss(
    ours: Sequence[float], theirs: Sequence[float], window: int, tolerance: float = TOLERANCE
) -> Check:
    """F-DP-005: every epoch's mean loss is that of a run without faults, within a tolerance."""
    whole = min(len(ours), len(theirs)) // window
    if whole == 0 or len(theirs) < len(ours):
        return Check("loss", False, f"{len(theirs)} undisturbed steps to compare {len(ours)} with")
    worst, where = 0.0, 0
    for index in range(whole):
        span = slice(index * window, (index + 1) * window)
        difference = abs(statistics.fmean(ours[span]) / statistics.fmean(theirs[span]) - 1)
        if not difference <= worst:  # also a NaN
            worst, where = difference, index
    detail = f"at most {worst:.2g} of it off a run without faults (epoch {where} of {whole})"
    return Check("loss", worst <= tolerance, detail)


def injected(injections: Sequence[Injection], drawn: int) -> Check:
    """Nearly all faults that were drawn have happened."""
    done = sum(not injection.missed for injection in injections)
    missed = Counter(i.fault.kind for i in injections if i.missed)
    others = "".join(f"; not {kind}: {count}" for kind, count in sorted(missed.items()))
    return Check("faults", done >= LEAST_INJECTED * drawn, f"{done} of {drawn}{others}")


def links(connections: Mapping[str, int]) -> Check:
    """Every worker reached the coordinator by its link, where it can be disturbed."""
    past = [name for name, count in connections.items() if count == 0]
    found = ", ".join(f"{count} of {name}" for name, count in connections.items())
    return Check("links", not past, f"went past its link: {', '.join(past)}" if past else found)


def recovered(found: Sequence[Recovery]) -> Check:
    """After every fault steps were committed again, and all workers came back."""
    for recovery in found:
        fault, lasted = recovery.injection.fault, recovery.injection.healed
        where = f"{fault.kind} of {fault.target} at {fault.at:.1f} s"
        if recovery.step is None or recovery.step > lasted - recovery.injection.began + LONGEST:
            after = "never" if recovery.step is None else f"after {recovery.step:.1f} s"
            return Check("recovery", False, f"{where}: the next step {after}")
        if recovery.lost and recovery.full is None:
            return Check("recovery", False, f"{where}: never were all workers back")
    slowest = max((r.step for r in found if r.step is not None), default=0.0)
    return Check("recovery", True, f"from all {len(found)}; the slowest step took {slowest:.1f} s")


def growth(usage: Mapping[tuple[str, int], Sequence[Usage]]) -> list[Check]:
    """No process that lives long holds more and more memory, descriptors or threads."""
    limits = {"memory": MEMORY_GROWTH, "descriptors": DESCRIPTOR_GROWTH, "threads": THREAD_GROWTH}
    worst: dict[str, tuple[float, str]] = dict.fromkeys(limits, (0.0, "no process"))
    looked_at = 0
    for (name, pid), all_samples in usage.items():
        samples = [s for s in all_samples if s.at - all_samples[0].at >= WARM]
        if len(samples) < 3 or samples[-1].at - samples[0].at < LONG_LIVED - WARM:
            continue
        looked_at += 1
        third = len(samples) // 3
        for what in limits:
            values = [getattr(sample, what) for sample in samples]
            more = statistics.median(values[-third:]) - statistics.median(values[:third])
            worst[what] = max(worst[what], (more, f"{name} (pid {pid})"))
    unit = {"memory": 2**20, "descriptors": 1, "threads": 1}
    return [
        Check(
            what,
            worst[what][0] <= limit,
            f"{looked_at} processes lived for long; the most: {worst[what][1]}"
            f" {worst[what][0] / unit[what]:+.1f}{' MiB' if what == 'memory' else ''}",
        )
        for what, limit in limits.items()
    ]


def files(kept: Iterable[str], temporary: Iterable[str], checkpoints: int, keep_last: int) -> Check:
    """Nothing half-written, temporary or obsolete is left on the disk.

    `kept` are paths below the output and state folders, `temporary` those in $TMPDIR and /dev/shm.
    """
    litter: list[str] = []
    leased: set[str] = set()
    for path in kept:
        folder, _, name = path.rpartition("/")
        if _LEASE.match(name) and folder not in leased:
            leased.add(folder)
        elif _UNFINISHED.match(name):
            litter.append(path)
    litter += [path for path in temporary if not _TORCH_OWN.match(path)]
    if checkpoints > keep_last:
        litter.append(f"{checkpoints} checkpoints instead of {keep_last}")
    more = f" and {len(litter) - 3} more" if len(litter) > 3 else ""
    return Check("files", not litter, (", ".join(litter[:3]) + more) or "nothing is left over")


def processes(left: Sequence[str], listening: bool) -> Check:
    """After `down` no process is left, and the port is free."""
    found = [*left, *(["the port is still in use"] if listening else [])]
    return Check("processes", not found, ", ".join(found) or "none is left, the port is free")
