"""Growth: what a run's commands take as one thing grows, and the slope.

    python benchmarks/growth.py [PART...] [--sizes 10 100 1000]

rows      conversations of the training data; a start again finds them encoded
steps     of the run's metrics, in place of those that it has
runs      that the state folder has; a start again is beside all of them
workers   on this machine
hosts     with a worker each: real sshds in network namespaces, as root
adapters  megabytes of trainable weights in fp32

Each size is a real run with a state folder and a cache of its own. Measured are its start until the
first step, a step, and when it was stopped `launch status`, `launch runs`, the dashboard's pages of
all runs and of this one, `launch report`, and its resumption until the next step. Of each the
seconds, the processor seconds of all processes and the peak memory of the largest, pages of mapped
files included; `own` is what it has beside these when it is measured. The slope is that of the
processor seconds, fitted to all sizes on a logarithmic scale: 1 grows as the size does, 0 does not
grow; `last` is that of the two largest sizes.
JSON: benchmarks/results/growth-PART.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rig.report import Ratio, Report, skip
from start import BIN, cpu_of, environment_of, free_port, processes, steps_of, wait_until

from benchmarks.rig.conversations import write_conversations
from benchmarks.rig.network import missing
from benchmarks.rig.recorded import write_metrics
from benchmarks.rig.ssh_hosts import SshHosts, ssh_hosts

LINEAR = 1.1
"""The largest slope that counts as linear."""
ROWS = 1000
"""Rows of the data where something else grows."""
STEPS = 5
SECONDS = 2.0
"""A step is measured over so many steps, and so many seconds, at least, after as many steps."""
SMALL = {"hidden-size": 64, "layers": 2, "heads": 4, "kv-heads": 2, "head-dim": 16}
LARGE = {"hidden-size": 512, "layers": 12, "heads": 8, "kv-heads": 4, "head-dim": 64}
LARGE |= {"intermediate-size": 1536}
"""Models, by the options of `trainer init-model`."""
MEGABYTES = 4 * 9728 / 1e6
"""Bytes of the rank-1 adapters of all linears of a layer of the large one, in fp32."""
MOST_OF_A_LAYER = 512 * MEGABYTES
"""At its full rank."""
SETTINGS = {
    "task": "causal-lm",
    "num_classes": "null",
    "data.validation": "null",
    "training.batch_size": 64,
    "training.max_steps": 10**6,
    "training.epochs": 10**6,
    "training.evaluate_every": 0,
    "checkpoint.every": 10**6,
}
"""Settings of each run, which goes on until it is stopped and validates at no step."""


READ = """
import sys, time, urllib.error, urllib.request
for url in sys.argv[1:]:
    while True:
        try:
            urllib.request.urlopen(url).read()
            break
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.1)
"""
"""Reads pages; while hosts have not answered yet the dashboard says that it cannot show them."""


class Spent(NamedTuple):
    """The cost of a command with all that it starts."""

    seconds: float
    cpu: float
    mebibytes: float
    """The peak of the largest process."""
    own: float = 0.0
    """The largest living process's memory without pages of files."""


class Bench:
    """`launch` with a state folder, a cache and a model of its own.

    Args:
        hosts: of the run; default: this machine.
        shape: options of `trainer init-model`.
    """

    def __init__(
        self,
        folder: Path,
        hosts: SshHosts | None = None,
        shape: Mapping[str, int] = SMALL,
    ) -> None:
        self.folder, self.model, self.output = folder, folder / "model", folder / "output"
        self._inside = hosts.inside if hosts else []
        self._words = ["-i", str(hosts.inventory)] if hosts else []
        here = ["-e", f"motley_port={free_port()}", "-e", "motley_devices=[{backend: cpu}]"]
        self._start = self._words or here
        self._mark = f"MOTLEY_STATE_DIR={folder}/"
        self._environment = {
            **os.environ,
            "MOTLEY_STATE_DIR": str(self.state),
            "MOTLEY_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self.run_id = ""
        sample = write_conversations(folder / "sample.jsonl", ROWS)
        sizes = [word for name, size in shape.items() for word in (f"--{name}", str(size))]
        words = ["init-model", "--data", str(sample), "--vocab-size", "512", *sizes]
        self._run([str(BIN / "trainer"), *words, "-o", str(self.model)])

    @property
    def state(self) -> Path:
        """The state folder of the machine that starts runs."""
        return self.folder / "state"

    def launch(self, *words: str) -> Spent:
        """Return what a command of `launch` takes."""
        return self._run([*self._inside, str(BIN / "launch"), *words, *self._words])[0]

    def up(self, *words: str) -> Spent:
        """Return what a start takes until its first step, in all processes that it leaves."""
        command = [*self._inside, str(BIN / "launch"), "cluster", "up", "--json"]
        command += ["--timeout", "3600"]  # the machine may be busy
        spent, printed = self._run([*command, *words, *self._start])
        self.run_id = json.loads(printed)["run_id"]
        living = self._living()
        return Spent(
            spent.seconds,
            spent.cpu + sum(map(cpu_of, living)),
            max(spent.mebibytes, *(mebibytes(pid, "VmHWM") for pid in living)),
            max(mebibytes(pid, "RssAnon") for pid in living),
        )

    def step(self) -> Spent:
        """Return what a step of the run takes."""
        metrics, living = self.output / "metrics.jsonl", self._living()
        wait_until(lambda: len(steps_of(metrics)) >= STEPS, "first steps")
        first, began, cpu = len(steps_of(metrics)), time.monotonic(), sum(map(cpu_of, living))
        end = began + SECONDS
        wait_until(
            lambda: time.monotonic() > end and len(steps_of(metrics)) >= first + STEPS, "steps"
        )
        seconds, cpu = time.monotonic() - began, sum(map(cpu_of, living)) - cpu
        done = len(steps_of(metrics)) - first
        peaks = [mebibytes(pid, "VmHWM") for pid in living]
        own = [mebibytes(pid, "RssAnon") for pid in living]
        return Spent(seconds / done, cpu / done, max(peaks), max(own))

    def dashboard(self) -> Spent:
        """Return what a dashboard takes until it has shown all runs and this one."""
        command = [*self._inside, str(BIN / "launch"), "dashboard", "--port", "0", *self._words]
        began = time.monotonic()
        with subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            page = server.stdout.readline().strip()
            pages = [f"{page}api/overview", f"{page}api/runs/{self.run_id}"]
            subprocess.run([*self._inside, sys.executable, "-c", READ, *pages], check=True)
            spent = Spent(
                time.monotonic() - began,
                cpu_of(server.pid),
                mebibytes(server.pid, "VmHWM"),
                mebibytes(server.pid, "RssAnon"),
            )
            server.terminate()
        return spent

    def _run(self, command: list[str]) -> tuple[Spent, str]:
        """Return what a command takes until it ends, and what it prints."""
        began = time.monotonic()
        with (self.folder / "log").open("wb") as log, (self.folder / "out").open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdout=out, stderr=log
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {(self.folder / 'log').read_text()[-2000:]}")
        seconds, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
        return Spent(seconds, cpu, usage.ru_maxrss / 1024), (self.folder / "out").read_text()

    def _living(self) -> list[int]:
        """Return the processes of runs, on all hosts."""
        return [
            pid
            for pid in processes()
            if any(each.startswith(self._mark) for each in environment_of(pid))
        ]


def mebibytes(pid: int, field: str) -> float:
    """Return a figure of a process's memory; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    found = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(next(found, "0")) / 1024


def measure_run(
    bench: Bench,
    data: Path,
    workers: int = 2,
    settings: Mapping[str, object] = MappingProxyType({}),
    grow: Callable[[], None] = lambda: None,
    *,
    again: bool = False,
) -> dict[str, Spent]:
    """Measure all commands of a run.

    Args:
        grow: changes what the run has left when it was stopped.
        again: measure a start of another such run, too.
    """
    words = ["--preset", "quickstart", "--model", str(bench.model), "--data", str(data)]
    for key, value in {**SETTINGS, **settings}.items():
        words += ["--set", f"{key}={value}"]
    expect = [*words, "--expect-workers", str(workers)]
    try:
        spent = {"a start": bench.up(*expect, "-o", str(bench.output)), "a step": bench.step()}
        bench.launch("cluster", "down")
        grow()
        run_id, page = bench.run_id, str(bench.folder / "report.html")
        spent["status"] = bench.launch("status")
        spent["the list of runs"] = bench.launch("runs")
        spent["the dashboard"] = bench.dashboard()
        spent["a report"] = bench.launch("report", run_id, "-o", page)
        spent["a resumption"] = bench.up("--resume", run_id)
        if again:
            bench.launch("cluster", "down")
            spent["a start again"] = bench.up(*expect, "-o", str(bench.folder / "again"))
    finally:
        bench.launch("cluster", "down", "--all")
    return spent


def measure_rows(folder: Path, rows: int) -> dict[str, Spent]:
    """Measure a run of so many rows."""
    data = write_conversations(folder / "train.jsonl", rows)
    return measure_run(Bench(folder), data, again=True)


def measure_steps(folder: Path, steps: int) -> dict[str, Spent]:
    """Measure a run that has made so many steps."""
    bench = Bench(folder)
    return measure_run(
        bench, folder / "sample.jsonl", grow=lambda: write_metrics(bench.output, steps)
    )


def measure_runs(folder: Path, runs: int) -> dict[str, Spent]:
    """Measure a run beside so many others."""
    bench = Bench(folder)
    data = folder / "sample.jsonl"
    return measure_run(bench, data, grow=lambda: copy_run(bench, runs - 1), again=True)


def copy_run(bench: Bench, copies: int) -> None:
    """Copy the state and the output of a stopped run to as many others."""
    kept = bench.state / "runs" / bench.run_id
    for number in range(copies):
        run_id = f"{bench.run_id[:-4]}{number:04x}"
        if run_id == bench.run_id:
            continue
        output = bench.folder / "outputs" / run_id
        shutil.copytree(kept, kept.with_name(run_id))
        shutil.copytree(bench.output, output)
        for file in (*kept.with_name(run_id).rglob("*"), *output.rglob("*")):
            if file.suffix in (".json", ".yaml"):
                text = file.read_text().replace(bench.run_id, run_id)
                file.write_text(text.replace(str(bench.output), str(output)))


def measure_workers(folder: Path, workers: int) -> dict[str, Spent]:
    """Measure a run of so many workers on this machine."""
    return measure_run(Bench(folder), folder / "sample.jsonl", workers)


def measure_hosts(folder: Path, hosts: int) -> dict[str, Spent]:
    """Measure a run of so many hosts."""
    if reason := missing():
        skip(reason)
    with ssh_hosts(folder, hosts) as network:
        return measure_run(Bench(folder, network), folder / "sample.jsonl", hosts)


def measure_adapters(folder: Path, megabytes: int) -> dict[str, Spent]:
    """Measure a run of one worker whose adapters have so many megabytes."""
    layers = max(LARGE["layers"], math.ceil(megabytes / MOST_OF_A_LAYER))
    bench = Bench(folder, shape={**LARGE, "layers": layers})
    rank = max(1, round(megabytes / layers / MEGABYTES))
    settings = {"lora.lora_rank": rank, "lora.lora_alpha": 2 * rank, "training.batch_size": 1}
    data = write_conversations(folder / "short.jsonl", ROWS, words=4)
    return measure_run(bench, data, 1, settings)


class Part(NamedTuple):
    """One thing that grows."""

    measure: Callable[[Path, int], dict[str, Spent]]
    """Measures all commands at one size."""
    sizes: tuple[int, ...]
    """Sizes that are measured unless others are given."""


PARTS = {
    "rows": Part(measure_rows, (10_000, 100_000, 300_000)),
    "steps": Part(measure_steps, (1000, 10_000, 100_000, 1_000_000)),
    "runs": Part(measure_runs, (10, 100, 1000)),
    "workers": Part(measure_workers, (1, 2, 4, 8, 16, 32)),
    "hosts": Part(measure_hosts, (1, 4, 10, 40)),
    "adapters": Part(measure_adapters, (5, 50, 200)),
}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", default=[])
    parser.add_argument("--sizes", type=int, nargs="+", help="of each part")
    options = parser.parse_args()
    return max([measure_part(name, options.sizes) for name in options.parts or PARTS])


def measure_part(name: str, sizes: Sequence[int] | None) -> int:
    """Measure and report a part as far as it goes; return 1 if anything grows too fast."""
    report, found = Report(f"growth-{name}"), dict[int, dict[str, Spent]]()
    for size in sorted(sizes or PARTS[name].sizes):
        try:
            with tempfile.TemporaryDirectory(prefix="motley-growth-") as scratch:
                found[size] = PARTS[name].measure(Path(scratch), size)
        except SystemExit as error:
            if not error.code:
                return 0  # it was skipped, and has said why
            # The machine is too small for it, and for larger ones.
            print(f"{name}, {size}: {error}", file=sys.stderr)
            break
    for command in next(iter(found.values()), ()):
        add(report, f"{name}, {command}", {size: each[command] for size, each in found.items()})
    return report.write()


def add(report: Report, name: str, spent: Mapping[int, Spent]) -> None:
    """Take the figures of a command at all sizes into the report, with their slope."""
    report.add(
        Ratio(f"{name}: slope of the processor time", slope(spent), "linear", LINEAR),
        last=round(slope(dict([*spent.items()][-2:])), 2),
        sizes=[*spent],
        **{
            field: [round(getattr(each, field), 3) for each in spent.values()]
            for field in Spent._fields
        },
    )


def slope(spent: Mapping[int, Spent]) -> float:
    """Return the exponent of the size by which the processor time grows; 0 for one size."""
    sizes = [math.log(size) for size in spent]
    seconds = [math.log(max(each.cpu, 0.001)) for each in spent.values()]
    return statistics.linear_regression(sizes, seconds).slope if len(sizes) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
