"""The report of a benchmark: one ratio per line as text, and JSON with machine and versions."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NoReturn

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parents[1] / "results")
"""Where JSON goes: the variable is set by scripts/gpu_report.sh, whose figures are of a card."""
PACKAGES = ("motley", "numpy", "cryptography", "torch")


@dataclass(frozen=True)
class Ratio:
    """One measured ratio; `target` is the worst value that is still good, None for context."""

    name: str
    value: float
    against: str
    """What the value is a multiple of."""
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def line(self) -> str:
        """Return the ratio as one line for people."""
        verdict = ""
        if self.target is not None:
            bound = "at most" if self.better == "lower" else "at least"
            verdict = f" ({bound} {self.target:g}: {'met' if self.met else 'MISSED'})"
        return f"{self.name}: {self.value:.3f} of {self.against}{verdict}"


class Report:
    """Collects ratios and figures, prints them as they come, and writes them.

    Args:
        file: where to; default: benchmarks/results/NAME.json.
    """

    def __init__(self, name: str, file: Path | None = None) -> None:
        self.name = name
        self._file = file or RESULTS / f"{name}.json"
        self.ratios: list[Ratio] = []
        self.figures: list[dict[str, Any]] = []
        """Everything measured behind the ratios."""

    def add(self, ratio: Ratio, **figures: Any) -> None:
        """Take a ratio in, with the figures that it comes from."""
        self.ratios.append(ratio)
        self.figures.append({"ratio": ratio.name, **figures})
        print(ratio.line(), flush=True)

    def write(self) -> int:
        """Write what there is so far, and return 1 if a target was missed, else 0."""
        result = {
            "benchmark": self.name,
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "versions": versions(),
            "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in self.ratios],
            "figures": self.figures,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_name(f"{self._file.name}.tmp")
        unfinished.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(self._file)
        return int(any(ratio.met is False for ratio in self.ratios))


def skip(reason: str) -> NoReturn:
    """Say why nothing is measured here, and leave without an error."""
    print(f"skipped: {reason}")
    sys.exit(0)


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, memory, kernel, and its load."""
    processor = ""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    memory = next((line.split()[1] for line in _lines("/proc/meminfo")), "0")
    return {
        "processor": processor or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    import ssl

    found = {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
