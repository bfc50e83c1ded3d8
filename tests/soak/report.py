"""What a soak found, for people and for programs (`motley.soak/1`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.checks import Check
from tests.soak.faults import Injection
from tests.soak.recovery import Recovery, summary
from tests.soak.timeline import Usage

SCHEMA = "motley.soak/1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """One soak."""

    seed: int
    seconds: float
    """From the first step to the last fault."""
    steps: int
    """Steps of the run."""
    taken_back: int
    """Commits after a checkpoint from which a restarted coordinator began again."""
    injections: Sequence[Injection]
    recoveries: Sequence[Recovery]
    checks: Sequence[Check]
    usage: Mapping[tuple[str, int], Sequence[Usage]]
    """What each process held, by name and pid."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kinds of fault that cannot be done on this machine, and what is missing."""
    folder: str = ""
    """Where to look; empty when nothing was kept."""

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    @property
    def happened(self) -> int:
        """Faults that took place."""
        return sum(not injection.missed for injection in self.injections)

    def tree(self) -> dict[str, Any]:
        """Return the report for programs."""
        after = {id(recovery.injection): recovery for recovery in self.recoveries}
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "steps": self.steps,
            "taken_back": self.taken_back,
            "checks": [vars(check) for check in self.checks],
            "recovery": summary(self.recoveries),
            "left_out": dict(self.left_out),
            "usage": [
                {"process": name, "pid": pid, "first": vars(samples[0]), "last": vars(samples[-1])}
                for (name, pid), samples in self.usage.items()
            ],
            "folder": self.folder,
            "faults": [_fault_tree(i, after.get(id(i))) for i in self.injections],
        }

    def text(self) -> str:
        """Return the report for people."""
        lines = [
            f"soak: seed {self.seed}, {self.happened} faults in {self.seconds / 60:.1f} min, "
            f"{self.steps} steps ({self.taken_back} more were taken back)",
            "",
            f"{'fault':18}{'count':>6}{'lost':>6}   {'next step, s':^22}   {'all back, s':^22}",
            f"{'':30}   {'p50':>6}{'p95':>8}{'max':>8}   {'p50':>6}{'p95':>8}{'max':>8}",
        ]
        for kind, row in summary(self.recoveries).items():
            times = f"   {_times(row['step'])}   {_times(row['full'])}"
            lines.append(f"{kind:18}{row['faults']:>6}{row['lost']:>6}{times}".rstrip())
        lines += [f"{kind:18}  left out: {why}" for kind, why in self.left_out.items()]
        lines.append("")
        for check in self.checks:
            lines.append(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:12} {check.detail}")
        if not self.passed:
            lines += ["", f"logs, metrics and report.json: {self.folder}"]
        return "\n".join(lines)


def _fault_tree(injection: Injection, recovery: Recovery | None) -> dict[str, Any]:
    return {
        **vars(injection.fault),
        "began": round(injection.began, 3),
        "healed": round(injection.healed, 3),
        "missed": injection.missed or None,
        "lost": recovery.lost if recovery else None,
        "step": _rounded(recovery.step if recovery else None),
        "full": _rounded(recovery.full if recovery else None),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _times(row: Mapping[str, float] | None) -> str:
    if row is None:
        return f"{'-':>6}{'':>16}"
    return f"{row['p50']:>6.1f}{row['p95']:>8.1f}{row['max']:>8.1f}"
