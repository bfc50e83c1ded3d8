"""All that only a real GPU can show, in parts of at most eight minutes: scripts/gpu_report.sh.

    bash scripts/gpu_report.sh [--out DIR] [--rehearse] [--gpu NAME] [--model DIR] PART...

Parts: check, speed, users, vulkan. Each line of a part (scripts/gpu_lines.py) is a command with a
time limit of its own. Its output goes to DIR/NAME.log and its result to DIR/NAME.json as soon as it
ends; DIR/summary.md is then written again, and benchmarks write their figures to DIR/figures. A
line that fails or exceeds its limit is recorded, and the part goes on. Run again, a part does only
the lines that have not passed. DIR is build/gpu-report, or build/gpu-rehearsal with `--rehearse`,
which runs every line in small on the CPU, without a card and a network, and with ten times the
limits: it proves that lines run. Without `--model`, the folder of a published model, the line that
trains one is left out.
Exit 1: a line of these parts did not pass; 2: it cannot start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import rmtree
from typing import NoReturn

from gpu_lines import LINES, PART_SECONDS, PARTS, Line

ROOT = Path(__file__).parents[1]
PATIENCE = 10
"""Times a limit that a rehearsal has: its machine may be slow or busy, and costs nothing."""
GRACE = 5.0
"""Seconds that a line has to end by itself after its limit."""
SHOWN = re.compile(
    r"^.+: -?\d[\d.]* of .+$"  # benchmarks/rig/report.py
    r"|^ratio_\w+ +\S+$|.* times ours;"  # wgpu_step.py, wgpu_gemm.py
    r"|.*step \d+, loss .+ tokens/s$"  # the end of a training run
)
"""Lines of an output that the summary shows."""
SKIPPED = re.compile(r"^(skipped: |=* *\d+ skipped)")
"""What benchmarks and pytest say where they do nothing, and end with exit code 0."""
SOFTWARE = "llvmpipe"
NOT_INHERITED = re.compile(r"PYTEST_|MOTLEY_(?!CACHE)|CI$")
"""Variables that would choose among a line's tests, or change how they and the trainer run."""


@dataclass(frozen=True)
class Result:
    """The end of a line."""

    part: str
    name: str
    command: list[str]
    code: int | None
    """Its exit code; None: it exceeded its limit."""
    seconds: float
    joules: float | None
    """Energy of all NVIDIA cards; None: their driver does not say."""
    said: list[str]
    """Ratios and speeds of its output, or else its last line."""

    @property
    def passed(self) -> bool:
        """Whether it ran, and without a fault."""
        return self.verdict == "passed"

    @property
    def verdict(self) -> str:
        """The result as people read it."""
        if self.code is None:
            return "exceeded its limit"
        if self.code:
            return f"exit code {self.code}"
        return "skipped" if all(map(SKIPPED.match, self.said)) and self.said else "passed"


class GpuReport:
    """Runs lines and records their results in a folder."""

    def __init__(
        self,
        out: Path,
        lines: Sequence[Line],
        gpu: str = "",
        model: Path | None = None,
        *,
        rehearse: bool = False,
    ) -> None:
        self.out = out
        self._lines = lines
        self._gpu = gpu
        self._model = model
        self._rehearse = rehearse
        self._left_out: dict[str, str] = {}
        """Results of lines without a run, by the line's name."""
        why = _missing_vulkan(gpu) if rehearse else ""
        for line in lines:
            if rehearse and not line.rehearsal:
                self._left_out[line.name] = "not rehearsed: needs a card"
            elif line.vulkan and why:
                self._left_out[line.name] = f"not rehearsed: {why}"
            elif not model and any("{model}" in word for word in self._words(line)):
                self._left_out[line.name] = "not run: no model folder"

    def run(self, part: str) -> bool:
        """Run the lines of a part that have not passed, and return whether all have then."""
        times = PATIENCE if self._rehearse else 1
        ends = time.monotonic() + times * PART_SECONDS
        for line in self._lines:
            if line.part != part or line.name in self._left_out:
                continue
            if self.passed(line):
                continue
            limit = min(times * line.limit, ends - time.monotonic())
            if limit <= 0:
                print(f"{line.name}: no time is left in this part; run it again", flush=True)
                continue
            result = self._run(line, limit)
            _write(self.out / f"{line.name}.json", json.dumps(asdict(result), indent=2) + "\n")
            self.summarize()
            print(f"{line.name}: {result.verdict} after {result.seconds:.1f} s", flush=True)
        self.summarize()
        here = [line for line in self._lines if line.part == part]
        return all(line.name in self._left_out or self.passed(line) for line in here)

    def passed(self, line: Line) -> bool:
        """Return whether the present command of a line has passed."""
        result = self.result(line)
        return result is not None and result.passed

    def command(self, line: Line) -> list[str]:
        """Return a line's command with the folders and the GPU filled in."""
        places = {"out": self.out, "models": self.out / "models", "gpu": self._gpu}
        places["model"] = self._model or "DIR"
        return [word.format(**places) for word in self._words(line)]

    def _words(self, line: Line) -> list[str]:
        return shlex.split(line.rehearsal if self._rehearse else line.command)

    def result(self, line: Line) -> Result | None:
        """Return the recorded result of a line's present command, or None."""
        try:
            found = Result(**json.loads((self.out / f"{line.name}.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None  # not run yet, or written by something else: it is run
        return found if found.command == self.command(line) else None

    def _run(self, line: Line, limit: float) -> Result:
        command = self.command(line)
        rmtree(self.out / line.name, ignore_errors=True)
        log = self.out / f"{line.name}.log"
        environment = {
            **{key: v for key, v in os.environ.items() if not NOT_INHERITED.match(key)},
            "BENCHMARK_RESULTS": str(self.out / "figures"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self._rehearse:  # which finds nothing that a real run is to know
            environment["MOTLEY_CACHE"] = str(self.out / "cache")
        before, began = _energy(), time.monotonic()
        with log.open("wb") as file, _group(command, environment, file) as process:
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
        seconds, after = time.monotonic() - began, _energy()
        joules = None if before is None or after is None else round(after - before, 1)
        part, name = line.part, line.name
        return Result(part, name, command, code, round(seconds, 1), joules, _said(log))

    def summarize(self) -> None:
        """Write summary.md: the card, and a row for each line."""
        title = "# Rehearsal on the CPU" if self._rehearse else "# Report of a card"
        text = [title, "", *(f"- {key}: {value}" for key, value in describe_machine().items()), ""]
        text += ["| part | line | result | s | J | what it said |", "|---|---|---|---|---|---|"]
        for line in self._lines:
            result = self.result(line)
            cells = ["not run", "", "", ""]
            if reason := self._left_out.get(line.name):
                cells[0] = reason
            elif result:
                energy = "" if result.joules is None else f"{result.joules:g}"
                cells = [result.verdict, f"{result.seconds:g}", energy, "<br>".join(result.said)]
            cells = [cell.replace("|", r"\|") for cell in cells]
            text.append(f"| {line.part} | {' | '.join([line.name, *cells])} |")
        text += ["", "Commands:", ""]
        text += [f"- {line.name}: `{shlex.join(self.command(line))}`" for line in self._lines]
        _write(self.out / "summary.md", "\n".join(text) + "\n")


def describe_machine() -> dict[str, str]:
    """Return card, driver and torch, as far as they are there."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    cards: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        cards = said.stdout.splitlines()
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"card, memory, driver": "; ".join(cards) or "none", "torch": torch}


@contextmanager
def _group(
    command: list[str], environment: dict[str, str], log: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own, which is ended with the block."""
    came: list[int] = []  # a signal while it starts ends it too, and is therefore taken up below
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        signal.signal(signal.SIGTERM, before)
        for number in came:
            _leave(number, None)
        yield process
    finally:
        if process.poll() is None:  # pytest and the trainer end their processes on this one
            _signal(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(group, number)


def _said(log: Path) -> list[str]:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    return [line for line in lines if SHOWN.match(line)] or [line for line in lines if line][-1:]


def _energy() -> float | None:
    """Return the joules that all NVIDIA cards have taken since their driver was loaded."""
    try:
        import pynvml

        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(card) for card in cards) / 1000
    except Exception:
        return None


def _missing_vulkan(gpu: str) -> str:
    """Return why a Vulkan device cannot be had, or nothing."""
    try:
        from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter

        select_adapter(gpu, allow_software=True)
    except Exception as error:
        return " ".join(f"no Vulkan device: {error}".split())
    return ""


def _write(path: Path, text: str) -> None:
    """Replace a file at once."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # ends the line's processes on the way


def main(words: Sequence[str] | None = None, lines: Sequence[Line] = LINES) -> int:
    """Run parts."""
    parser = argparse.ArgumentParser(
        prog="gpu_report.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--rehearse", action="store_true", help="in small, on the CPU")
    parser.add_argument("--gpu", metavar="NAME", help="Vulkan's name of the card, or a part of it")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a published model, if carried")
    options = parser.parse_args(words)
    model: Path | None = options.model and options.model.resolve()
    if model and not (model / "config.json").is_file():
        parser.error(f"--model {model}: has no config.json")
    out = options.out or ROOT / "build" / ("gpu-rehearsal" if options.rehearse else "gpu-report")
    gpu = (SOFTWARE if options.rehearse else "") if options.gpu is None else options.gpu
    signal.signal(signal.SIGTERM, _leave)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        report = GpuReport(out.resolve(), lines, gpu, model, rehearse=options.rehearse)
        passed = [report.run(part) for part in options.parts]
    except OSError as error:
        print(f"gpu_report.sh: {error}", file=sys.stderr)
        return 2
    print(out / "summary.md")
    return int(not all(passed))


if __name__ == "__main__":
    raise SystemExit(main())
