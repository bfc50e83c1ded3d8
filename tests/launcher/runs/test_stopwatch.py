"""Where the time of a command went."""

import subprocess
import sys

from launcher.runs.stopwatch import Stopwatch


def test_laps_add_up_from_the_beginning_of_the_process() -> None:
    code = (
        "import time\ntime.sleep(0.2)\n"
        "from launcher.runs.stopwatch import Stopwatch\n"
        "watch = Stopwatch()\nwatch.end_lap('connect')\nwatch.end_lap('start')\n"
        "print(watch.laps['connect'] >= 0.2, list(watch.seconds_by_lap()), watch.describe_laps())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, _, line = done.stdout.strip().partition("] ")
    assert before == "True ['connect', 'start', 'total'"
    assert line.startswith(("0.", "1.", "2.", "3.", "4.", "5.", "6.", "7.", "8.", "9."))
    assert " s: connect " in line


def test_a_lap_may_go_on() -> None:
    watch = Stopwatch()
    for name in ("a", "b", "a"):
        watch.end_lap(name)
    assert list(watch.laps) == ["a", "b"]
    assert abs(sum(watch.laps.values()) - watch.total) < 0.01
