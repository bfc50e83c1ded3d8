"""The dashboard: the page's size, the time to draw 100,000 points, and what it costs a training.

    python benchmarks/dashboard.py [--points 100000] [--repeats 7] [--windows 6] [--seconds 15]

1. The files of the page, each compressed with gzip, over 60 kB.
2. A curve of 100,000 points in Chromium, from the data to the canvas: processor time of the page's
   thread, and the wall clock beside it, over 100 ms. Beside it the whole page of a run of 100,000
   steps of three workers, whose five figures have ten such curves: at first, and with a new step.
3. Processor seconds of a training's processes a step while a page is open in Chromium, over those
   while none is, in windows that alternate; and what the dashboard itself takes of a core.
4. Memory of the server for the history of a run of a million steps of three workers, over 100 MB.

Chromium runs on the same cores; elsewhere it is the reader's.
JSON: benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rig.browser import Browser
from rig.report import Ratio, Report, skip

from benchmarks.start import BIN, a_run, cpu_of, environment_of, prepare, processes, steps_of
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.records.run import Run
from launcher.views.dashboard.history import History
from launcher.views.dashboard.server import PAGE

KB = 60.0
MILLISECONDS = 100.0
SLOWER = 1.01
MEGABYTES = 100.0
HERE = Host(name="localhost", connection="local")
RUN = "bench-20261120-110300-7f3a"
SYNTHETIC = """
const made = (n) => ({kind: "step", step: n, time: 1.8e9 + n, epoch: 0, seconds: 0.5,
  loss: 2 / Math.sqrt(n) + 0.1 * Math.random(), learning_rate: 1e-4 * (1 - n / 2e5),
  tokens_per_second: 1e4 + 1e3 * Math.random(), exchange_ms: 30 + Math.random(),
  exchange_exposed_ms: 10 + Math.random(), shares: {0: 8, 1: 8, 2: 16},
  worker_seconds: {0: 0.3, 1: 0.4, 2: 0.4}, worker_overlap_seconds: {0: 0.1, 1: 0.1, 2: 0.1},
  counted: [32 * n - 32, 32 * n, 0, 0], so_far: [32 * n, 0, 0, 5000 * n]});
const all = Array.from({length: POINTS}, (_, at) => made(at + 1));
const state = {status: {run_id: "run", state: "running", live: true, started: 1, processes: [],
  unreachable: {}, training: null}, now: 2, gauges: {}, devices: {}, device_names: {}, left: null};
window.fetch = async () => ({ok: true, json: async () => ({...state, cursor: 1, records: all})});
window.EventSource = class {
  addEventListener(name, handle) { if (name === "records") window.more = handle; }
  close() {}
};
const drawn = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
window.grow = () => {
  window.more({data: JSON.stringify([made(all.length + 1)]), lastEventId: "2"});
  return drawn();
};
window.curve = async () => {
  const {Charts} = await import("./charts.js");
  const charts = new Charts(() => {});
  const loss = {name: "loss", colour: "blue", value: (step) => step.loss, text: String};
  const figure = charts.add("Loss", [loss]);
  document.querySelector("main").replaceChildren(figure);
  const began = performance.now();
  charts.draw([...all], []);
  await drawn();
  return performance.now() - began;
};
"""
"""In the page: a run that no server has, and what is measured."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the history")
    parser.add_argument("--parts", choices=("size", "draw", "step", "memory"), action="append")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        skip("needs chromium")
    report = Report("dashboard")
    parts = options.parts or ["size", "draw", "step", "memory"]
    with tempfile.TemporaryDirectory(prefix="motley-dashboard-") as scratch:
        folder = Path(scratch)
        if "size" in parts:
            size(report)
        if "draw" in parts:
            draw(report, folder / "draw", options.points, options.repeats)
        if "step" in parts:
            step(report, folder / "step", options.windows, options.seconds)
        if "memory" in parts:
            memory(report, folder / "memory", options.steps)
    return report.write()


def size(report: Report) -> None:
    """Measure what a browser loads."""
    kinds = (".html", ".js", ".css", ".svg")
    sent = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in kinds}
    total = sum(len(gzip.compress(data, 6)) for data in sent.values()) / 1000
    report.add(Ratio("the page, gzipped", total / KB, "60 kB", 1.0), kilobytes=round(total, 1))


def draw(report: Report, folder: Path, points: int, repeats: int) -> None:
    """Measure how long a curve takes, and the page of a run."""
    with serving(folder / "state") as url, a_browser(folder) as browser:
        script = f"const POINTS = {points};{SYNTHETIC}"
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        browser.call("Performance.enable", timeDomain="threadTicks")
        before = task_seconds(browser)
        browser.open(f"{url}#/run/run")
        browser.wait("document.querySelectorAll('canvas').length === 5 && Boolean(window.more)")
        whole = 1000 * (task_seconds(browser) - before)
        grown = [spent(browser, "window.grow()") for _ in range(repeats)]
        curves: list[float] = []
        wall: list[float] = []
        for _ in range(repeats + 1):  # the first compiles
            before = task_seconds(browser)
            wall.append(float(browser.run("window.curve()")))
            curves.append(1000 * (task_seconds(browser) - before))
        assert not browser.errors, browser.errors
    curves, wall = curves[1:], wall[1:]
    report.add(
        Ratio(
            f"a curve of {points:,} points, processor time of the page",
            statistics.median(curves) / MILLISECONDS,
            "100 ms",
            1.0,
        ),
        cpu_ms=[round(value, 1) for value in curves],
        wall_ms=[round(value, 1) for value in wall],
    )
    report.add(
        Ratio(
            f"the page of a run of {points:,} steps, drawn again with a new one",
            statistics.median(grown) / MILLISECONDS,
            "100 ms",
        ),
        cpu_ms=[round(value, 1) for value in grown],
        first_cpu_ms=round(whole, 1),
    )


def spent(browser: Browser, script: str) -> float:
    """Return the milliseconds of processor time of the page's thread that a script takes."""
    before = task_seconds(browser)
    browser.run(script)
    return 1000 * (task_seconds(browser) - before)


def task_seconds(browser: Browser) -> float:
    """Return the processor seconds of the page's thread so far."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def step(report: Report, folder: Path, windows: int, seconds: float) -> None:
    """Measure a step's processor time with an open page and without, in turn."""
    folder.mkdir()
    prepare(folder)
    without: list[float] = []
    beside: list[float] = []
    server: list[float] = []
    with a_run(folder) as run:
        state = f"MOTLEY_STATE_DIR={run.state.parents[1]}"
        pids = [pid for pid in processes() if state in environment_of(pid)]
        a_step(run.metrics, pids, seconds)  # the shares settle
        for _ in range(windows):
            without.append(a_step(run.metrics, pids, seconds))
            with serving(run.state.parents[1]) as url, a_browser(folder) as browser:
                browser.open(f"{url}#/run/{run.state.name}")
                browser.wait("document.querySelectorAll('canvas').length === 5")
                more = [pid for pid in processes() if state in environment_of(pid)]
                own = [pid for pid in more if pid not in pids]
                began = time.monotonic(), sum(map(cpu_of, own))
                beside.append(a_step(run.metrics, pids, seconds))
                server.append((sum(map(cpu_of, own)) - began[1]) / (time.monotonic() - began[0]))
    ratios = [one / other for one, other in zip(beside, without, strict=True)]
    report.add(
        Ratio(
            "a step of three workers with the page open, processor time of the training",
            statistics.median(ratios),
            "without",
            SLOWER,
        ),
        ratios=[round(value, 4) for value in ratios],
        cpu_seconds_without=[round(value, 4) for value in without],
        dashboard_cores=round(statistics.median(server), 3),
    )


def a_step(metrics: Path, pids: Sequence[int], seconds: float) -> float:
    """Return the processor seconds that some processes take for a step."""
    steps, cpu = len(steps_of(metrics)), sum(map(cpu_of, pids))
    time.sleep(seconds)
    return (sum(map(cpu_of, pids)) - cpu) / max(1, len(steps_of(metrics)) - steps)


def memory(report: Report, folder: Path, steps: int) -> None:
    """Measure what the history of a long run takes."""
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(steps):
            first = 24 * number
            line = {
                "kind": "step",
                "time": 1.8e9 + number / 7,
                "step": number + 1,
                "epoch": 0,
                "loss": 2.0 / (1 + number / 7),
                "learning_rate": 1e-4 / (1 + number / 7),
                "tokens_per_second": 1e4 / 7 + number % 13,
                "seconds": 0.5 / 7,
                "exchange_ms": 30 / 7,
                "exchange_exposed_ms": 10 / 7,
                "shares": {"0": 8, "1": 8, "2": 8},
                "worker_seconds": {"0": 3 / 7, "1": 4 / 7, "2": 5 / 7},
                "worker_overlap_seconds": {"0": 1 / 7, "1": 1 / 7, "2": 1 / 7},
                "samples": [[rank, first + 8 * rank, first + 8 * rank + 8] for rank in range(3)],
            }
            file.write(json.dumps(line) + "\n")
    leader = ProcessPlan(
        name="coordinator",
        role="coordinator",
        host=HERE.name,
        device="",
        backend="",
        threads=None,
        argv=(),
        env={},
        folder=str(folder),
    )
    plan = LaunchPlan(run_id=RUN, output=str(folder), hosts=(HERE,), processes=(leader,))
    history = History(Run(plan, 0.0, (HERE,)))
    before, began = resident(), time.process_time()
    history.read_on()
    taken, cpu = (resident() - before) / 1e6, time.process_time() - began
    _, text = history.after(0) or (0, "[]")
    report.add(
        Ratio(f"memory for the history of {steps:,} steps", taken / MEGABYTES, "100 MB", 1.0),
        megabytes=round(taken, 1),
        sent_megabytes=round(len(text) / 1e6, 1),
        sent_steps=len(json.loads(text)),
        cpu_microseconds_a_step=round(1e6 * cpu / steps, 1),
    )


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def serving(state: Path) -> Iterator[str]:
    """Serve the runs of a state folder, and yield the page's address."""
    state.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [str(BIN / "launch"), "dashboard", "--port", "0"],
        env={**os.environ, "MOTLEY_STATE_DIR": str(state)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def a_browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium and end it."""
    with tempfile.TemporaryDirectory(dir=folder) as profile:
        browser = Browser(Path(profile))
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    sys.exit(main())
