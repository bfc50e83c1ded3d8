"""The dashboard: the page's size, the time to draw 100,000 points, and what it costs a training.

    python benchmarks/dashboard.py [--points 100000] [--repeats 7] [--windows 6] [--seconds 15]

1. The files of the page, each compressed with gzip, over 60 kB.
2. A curve of 100,000 points in Chromium, from the data to the canvas: processor time of the page's
   thread, and the wall clock beside it, over 100 ms. Beside it the whole page of a run of 100,000
   steps of three workers, whose five figures have ten such curves: at first, and with a new step.
3. A step of a training while a page is open over one while none is, in windows that alternate:
   processor seconds of its processes, and the wall clock; the page in Chromium on the same cores,
   and elsewhere, which is a reader of its stream. What the dashboard itself takes of a core.
4. A run of a million steps of three workers: memory of the server for its history over 50 MB, the
   time to read one step, and the report.

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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from rig.browser import Browser
from rig.recorded import write_metrics
from rig.report import Ratio, Report, skip

from benchmarks.start import BIN, a_run, cpu_of, environment_of, prepare, processes, steps_of
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.records.registry import Registry
from launcher.runs.records.run import Run
from launcher.views.dashboard.history import History
from launcher.views.dashboard.report import as_html, make_report
from launcher.views.dashboard.server import PAGE

KB = 60.0
MILLISECONDS = 100.0
SLOWER = 1.01
MEGABYTES = 50.0
MICROSECONDS = 100.0
HERE = Host(name="localhost", connection="local")
RUN = "bench-20261120-110300-7f3a"
SYNTHETIC = """
const made = (n) => ({kind: "step", step: n, time: 1.8e9 + n, epoch: 0, seconds: 0.5,
  loss: 2 / Math.sqrt(n) + 0.1 * Math.random(), learning_rate: 1e-4 * (1 - n / 2e5),
  tokens_per_second: 1e4 + 1e3 * Math.random(), exchange_ms: 30 + Math.random(),
  exchange_exposed_ms: 10 + Math.random(), worker_samples: {0: 8, 1: 8, 2: 16},
  worker_seconds: {0: 0.3, 1: 0.4, 2: 0.4}, worker_overlap_seconds: {0: 0.1, 1: 0.1, 2: 0.1},
  ledger: [32 * n - 32, 32 * n, 0, 0], totals: [32 * n, 0, 0, 5000 * n]});
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


class Window(NamedTuple):
    """A step's cost in some seconds of a training."""

    cpu: float
    """Processor seconds of all of its processes."""
    wall: float


def step(report: Report, folder: Path, windows: int, seconds: float) -> None:
    """Measure a step's cost with an open page and without, in turn: A B, B A, A B."""
    folder.mkdir()
    prepare(folder)
    with a_run(folder) as run:
        state = f"MOTLEY_STATE_DIR={run.state.parents[1]}"
        pids = [pid for pid in processes() if state in environment_of(pid)]
        a_step(run.metrics, pids, seconds)  # until assignments are steady
        for reader, opened in READERS.items():
            pairs: list[tuple[Window, Window]] = []
            cores: list[float] = []
            for number in range(windows):
                found: dict[bool, Window] = {}
                for read in (False, True) if number % 2 else (True, False):
                    if not read:
                        found[read] = a_step(run.metrics, pids, seconds)
                        continue
                    with serving(run.state.parents[1]) as url, opened(folder, url, run.state.name):
                        more = [pid for pid in processes() if state in environment_of(pid)]
                        own = [pid for pid in more if pid not in pids]
                        began = time.monotonic(), sum(map(cpu_of, own))
                        found[read] = a_step(run.metrics, pids, seconds)
                        spent = sum(map(cpu_of, own)) - began[1]
                        cores.append(spent / (time.monotonic() - began[0]))
                pairs.append((found[True], found[False]))
            add_step(report, reader, pairs, cores)


def add_step(
    report: Report, reader: str, pairs: Sequence[tuple[Window, Window]], cores: Sequence[float]
) -> None:
    """Take the ratios of pairs of windows into a report, with their spread."""
    for name, at in (("processor time of the training", 0), ("wall clock", 1)):
        ratios = sorted(with_page[at] / without[at] for with_page, without in pairs)
        report.add(
            # A browser on the same cores takes of the clock what elsewhere its reader's would give.
            Ratio(
                f"a step of three workers, {reader}, {name}",
                statistics.median(ratios),
                "without",
                SLOWER if name != "wall clock" or reader != IN_CHROMIUM else None,
            ),
            ratios=[round(value, 4) for value in ratios],
            quartiles=[round(value, 4) for value in statistics.quantiles(ratios, n=4)],
            seconds_without=[round(without[at], 4) for _, without in pairs],
            dashboard_cores=round(statistics.median(cores), 3),
        )


def a_step(metrics: Path, pids: Sequence[int], seconds: float) -> Window:
    """Return what a training's step takes in some seconds."""
    steps, cpu, began = len(steps_of(metrics)), sum(map(cpu_of, pids)), time.monotonic()
    time.sleep(seconds)
    done = max(1, len(steps_of(metrics)) - steps)
    return Window((sum(map(cpu_of, pids)) - cpu) / done, (time.monotonic() - began) / done)


@contextmanager
def in_chromium(folder: Path, url: str, run_id: str) -> Iterator[None]:
    """Have the page of a run open in Chromium."""
    with a_browser(folder) as browser:
        browser.open(f"{url}#/run/{run_id}")
        browser.wait("document.querySelectorAll('canvas').length === 5")
        yield


@contextmanager
def by_stream(_: Path, url: str, run_id: str) -> Iterator[None]:
    """Read what an open page gets, as if it was drawn elsewhere."""
    at = urlsplit(url)
    connection = HTTPConnection(str(at.hostname), at.port)
    connection.request("GET", f"{at.path}api/runs/{run_id}/events?after=0")
    answer = connection.getresponse()
    reader = threading.Thread(target=lambda: [*iter(answer.readline, b"")], daemon=True)
    reader.start()
    yield
    assert reader.is_alive(), "the server ended the stream"


IN_CHROMIUM = "the page in Chromium on the same cores"
READERS = {IN_CHROMIUM: in_chromium, "the page elsewhere": by_stream}


def memory(report: Report, folder: Path, steps: int) -> None:
    """Measure what the history of a long run takes."""
    folder.mkdir()
    write_metrics(folder, steps)
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
    run = Run(plan, 0.0, (HERE,))
    history = History(run)
    before, began = resident(), time.process_time()
    history.read_on()
    taken, cpu = (resident() - before) / 1e6, time.process_time() - began
    _, text = history.select_lines_after(0) or (0, "[]")
    report.add(
        Ratio(f"memory for the history of {steps:,} steps", taken / MEGABYTES, "50 MB", 1.0),
        megabytes=round(taken, 1),
        sent_megabytes=round(len(text) / 1e6, 1),
        sent_steps=len(json.loads(text)),
    )
    one = 1e6 * cpu / steps
    report.add(
        Ratio("processor time to read a step of it", one / MICROSECONDS, "100 us", 1.0),
        microseconds=round(one, 1),
    )
    began = time.process_time()
    page = as_html(make_report(Registry.for_this_user(), run))
    spent = time.process_time() - began
    report.add(
        Ratio(f"a report of {steps:,} steps, processor time", spent, "a second"),
        megabytes=round(len(page) / 1e6, 1),
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
