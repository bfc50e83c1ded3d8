"""Draw the run that is up as `launch status --watch` shows it: the picture in docs/commands.md.

launch cluster up --expect-workers 3 --preset quickstart     # and, while it trains:
python scripts/status_picture.py [--run ID] [--step 200] [-o docs/status-watch.svg]
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from launcher.runs.records.registry import Registry
from launcher.runs.status import OVER, RunMonitor, find_run
from launcher.views.live import live_view
from launcher.views.telemetry import Telemetry, TelemetrySnapshot

ROOT = Path(__file__).parents[1]
WIDTH = 80
_TITLE = "launch status --watch"


def main() -> int:
    """Look at a run up to a step, then draw the last look."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", metavar="ID", help="default: the run that is up")
    parser.add_argument("--step", type=int, default=200, help="the step to draw; default: 200")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "status-watch.svg")
    options = parser.parse_args()
    run = find_run(Registry.default(), options.run)
    if run is None:
        sys.exit("status_picture: no run; start one with: launch cluster up")
    telemetry = Telemetry(RunMonitor(run))
    telemetry.start()
    try:
        while (snapshot := telemetry.latest()).view.state not in OVER:
            # The hosts are asked for memory apart: a first look may not have it yet.
            if (snapshot.view.training or {}).get("step", 0) >= options.step and snapshot.gauges:
                break
            time.sleep(0.5)
    finally:
        telemetry.close()
    if snapshot.view.state != "running":
        sys.exit(f"status_picture: {run.run_id} is {snapshot.view.state}, not running")
    options.output.write_text(picture(snapshot), encoding="utf-8")
    print(f"{options.output}: {run.run_id}, {WIDTH} columns")
    return 0


def picture(snapshot: TelemetrySnapshot) -> str:
    """Return what a terminal shows as SVG, in the reader's own fonts: none is fetched."""
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, highlight=False
    )
    console.print(live_view(snapshot, WIDTH))
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = plain.replace("Fira Code, monospace", "ui-monospace, Consolas, Menlo, monospace")
    plain = plain.replace("font-family: arial", "font-family: system-ui, sans-serif")
    drawn = console.export_svg(title=_TITLE, code_format=plain, unique_id="status-watch")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
