"""Record a run of which a cable is pulled and plugged in again: the picture in README.md.

sudo .venv/bin/python scripts/cable_recording.py [-o docs/cable.svg]

Its three hosts are network namespaces of this machine on a switch of their own, hence root; the
machine's own network is not touched. `launch cluster up` starts a run of a worker on each, and
`launch status --watch` shows it on a terminal, of which all that it shows is recorded. The picture
plays that in real time; only what the script does to the cable is written below it.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import io
import json
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.ansi import AnsiDecoder
from rich.color import Color, blend_rgb
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rig.network import ShapedNetwork, missing  # noqa: E402 - of this checkout

BIN = Path(sys.executable).parent
HOSTS = ("box", "tower", "laptop")
"""The last has the cable that is pulled."""
SETTINGS = (
    *("training.max_steps=2000", "training.epochs=100", "training.batch_size=12", "method=full"),
    *("training.evaluate_every=1000", "checkpoint.every=1000", "data.max_seq_len=64"),
    "exchange.shares=equal",
)
"""Of a run in short steps that outlasts the recording; equal shares are calm on a busy machine."""
COLUMNS, ROWS = 80, 24
WIDTH, HEIGHT, SIZE = 8.4, 18, 14
"""Pixels of a character, and the size of its font."""
EDGE, BAR = 14, 34
"""Pixels around the text, and of the window's title and of the line below it."""
GROUND, TEXT = "#292929", "#c5c8c6"
_PATIENCE = 900.0
_BEFORE, _WITHOUT, _AFTER = 4.0, 7.0, 6.0
"""Seconds that are shown before the cable is pulled, without it, and once the worker is back."""
_END = 3.0
"""Seconds that the last frame stays."""


class Screen:
    """What a terminal shows of a program that draws whole lines, as `rich.live` does."""

    def __init__(self) -> None:
        self._rows = [""]
        self._row = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Take what the program writes, in any pieces."""
        text = self._rest + self._decoder.decode(data)
        cut = re.search(r"(\x1b(\[[0-9;?]*)?)?\Z", text)
        assert cut is not None, "the end is always found"
        text, self._rest = text[: cut.start()], cut[0]
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
            if part == "\n":
                self._row += 1
                self._rows += [""] * (self._row + 1 - len(self._rows))
            elif found := re.fullmatch(r"\x1b\[(\d*)A", part):
                self._row = max(0, self._row - int(found[1] or 1))
            elif part == "\x1b[2K":
                self._rows[self._row] = ""
            elif part != "\r" and not re.match(r"\x1b\[.*[^m]$", part):
                self._rows[self._row] += part

    @property
    def rows(self) -> tuple[str, ...]:
        """Return the lines with their styles, without the empty ones at the end."""
        last = max((at for at, row in enumerate(self._rows) if row.strip()), default=-1)
        return tuple(self._rows[: last + 1])


@dataclass(frozen=True)
class Frame:
    """What was shown from a moment on."""

    at: float
    rows: tuple[str, ...]
    said: str
    """What is written below it."""


def main() -> int:
    """Record a run and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "cable.svg")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"cable_recording: {reason}")
    with tempfile.TemporaryDirectory(prefix="motley-cable-") as folder:
        frames = record(Path(folder))
    options.output.write_text(animation(frames), encoding="utf-8")
    print(f"{options.output}: {len(frames)} frames, {frames[-1].at:.0f} s")
    return 0


def record(folder: Path) -> list[Frame]:
    """Start a run, pull the cable of its last host for a while, and return what was shown."""
    environment = os.environ | {"MOTLEY_STATE_DIR": str(folder / "state"), "TERM": "xterm-256color"}
    environment |= {"COLORTERM": "truecolor", "OMP_NUM_THREADS": "1"}
    environment["MOTLEY_INVENTORY"] = str(folder / "hosts.yml")
    environment.pop("NO_COLOR", None)
    for words in (
        "generate-data shell-safety -o data",
        "init-model --data data/validation.jsonl -o model",
    ):
        command = [str(BIN / "trainer"), *words.split()]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with ShapedNetwork(len(HOSTS), 10**9) as network:
        write_inventory(folder / "hosts.yml", network)
        head = network.inside(0)

        def launch(*words: str) -> None:
            command = [*head, str(BIN / "launch"), *words]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"cable_recording: {' '.join(words)}: {done.stderr}{done.stdout}")

        words = ["--model", "model", "--data", "data/validation.jsonl", "--output", "output"]
        for setting in SETTINGS:
            words += ["--set", setting]
        wait = ("--timeout", f"{_PATIENCE:g}")  # for workers that join, on a busy machine
        launch("cluster", "up", "-n", str(len(HOSTS)), *words, *wait)
        try:
            command = [*head, str(BIN / "launch"), "status", "--watch"]
            with terminal(command, folder, environment) as recorder:
                return pull_and_plug(recorder, network, folder / "output")
        finally:
            launch("cluster", "down")


def write_inventory(path: Path, network: ShapedNetwork) -> None:
    """Write three hosts, of which each runs its worker in its own namespace."""
    hosts = {
        name: {
            "ansible_connection": "local",
            "motley_coordinator": index == 0,
            "motley_bind_address": network.address(index),
            "motley_devices": [{"backend": "cpu", "threads": 1}],
            "motley_state_folder": str(path.parent / "hosts" / name),
            "motley_trainer_command": [*network.inside(index), str(BIN / "trainer")],
        }
        for index, name in enumerate(HOSTS)
    }
    path.write_text(json.dumps({"all": {"hosts": hosts}}))


class Recorder:
    """The frames of a terminal so far."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._screen = Screen()
        self._began = time.monotonic()
        self.said = ""
        self.frames: list[Frame] = []

    @property
    def rows(self) -> tuple[str, ...]:
        """Return the lines of the last frame."""
        return self.frames[-1].rows if self.frames else ()

    def watch(self, until: Callable[[], bool]) -> None:
        """Record until something is true."""
        deadline = time.monotonic() + _PATIENCE
        while not until():
            assert time.monotonic() < deadline, "\n".join(self._screen.rows)
            pause = 0.1
            while select.select([self._descriptor], [], [], pause)[0]:
                pause = 0.03  # what is left of a picture is there
                try:
                    self._screen.feed(os.read(self._descriptor, 1 << 16))
                except OSError:  # the program has ended
                    sys.exit("\n".join(["cable_recording:", *self._screen.rows]))
            rows = self._screen.rows
            if not self.frames or (rows, self.said) != (self.frames[-1].rows, self.frames[-1].said):
                at = time.monotonic() - self._began
                self.frames.append(Frame(at, rows, self.said))

    def watch_for(self, seconds: float) -> None:
        """Record for a while."""
        end = time.monotonic() + seconds
        self.watch(lambda: time.monotonic() >= end)


@contextmanager
def terminal(
    command: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[Recorder]:
    """Run a program on a terminal of its own; `q` ends it."""
    outside, inside = os.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=inside,
        stdout=inside,
        stderr=subprocess.DEVNULL,  # a note that a slow machine is still reading
        start_new_session=True,
    )
    os.close(inside)
    try:
        yield Recorder(outside)
        os.write(outside, b"q")
    finally:
        program.terminate()
        program.wait(_PATIENCE)
        os.close(outside)


def pull_and_plug(recorder: Recorder, network: ShapedNetwork, output: Path) -> list[Frame]:
    """Record the last host's worker at work, lost, and back at work."""
    rank, name = len(HOSTS) - 1, HOSTS[-1]

    def works() -> bool:
        return any(
            worker["rank"] == rank and worker["state"] == "active" and worker["samples"]
            for worker in status(output).get("workers", ())
        )

    shown = re.compile(rf"worker-{rank} .*active")  # with escape sequences around its words
    recorder.watch(lambda: works() and any(map(shown.search, recorder.rows)))
    first = len(recorder.frames) - 1
    recorder.watch_for(_BEFORE)
    network.unplug(rank)
    recorder.said = f"the cable of {name} is pulled"
    recorder.watch(lambda: not works())
    recorder.watch_for(_WITHOUT)
    network.plug(rank)
    recorder.said = f"the cable of {name} is plugged in again"
    recorder.watch(works)
    recorder.watch_for(_AFTER)
    began = recorder.frames[first].at
    return [Frame(each.at - began, each.rows, each.said) for each in recorder.frames[first:]]


def status(output: Path) -> dict[str, Any]:
    """Return what the coordinator says of the run."""
    try:
        return json.loads((output / "status.json").read_bytes())
    except FileNotFoundError:
        return {}


def animation(frames: Sequence[Frame]) -> str:
    """Return frames as SVG that plays them again and again, in the reader's own fonts.

    They lie below each other on a film that jumps from one to the next. Who wants no motion sees
    the one in the middle.
    """
    height = HEIGHT * max(len(frame.rows) for frame in frames)
    wide, high = WIDTH * COLUMNS + 2 * EDGE, height + 2 * BAR
    whole = frames[-1].at + _END
    drawing = _Drawing()
    film, stops = list[str](), list[str]()
    for number, frame in enumerate(frames):
        stops.append(f"{100 * frame.at / whole:.2f}%{{transform:translateY(-{number * height}px)}}")
        lines = [
            f'<use href="#{drawing.line(row)}" y="{number * height + HEIGHT * at}"/>'
            for at, row in enumerate(frame.rows)
            if row.strip()
        ]
        film.append("".join(lines))
    said = list[str]()
    for number, frame in enumerate(frames):
        if frame.said:
            y = number * BAR + BAR / 2 + 5
            said.append(f'<text x="0" y="{y:g}" class="said">{escape(frame.said)}</text>')
    below = [stop.replace(f"-{n * height}px", f"-{n * BAR}px") for n, stop in enumerate(stops)]
    middle = len(frames) // 2
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" role="img">
<title>launch status --watch: a cable is pulled, the run goes on, the worker returns</title>
<style>
text {{ font: {SIZE}px ui-monospace, Consolas, Menlo, monospace; fill: {TEXT}; white-space: pre }}
.title, .said {{ font-family: system-ui, sans-serif; font-weight: bold }}
.said {{ fill: #f0c674 }}
{drawing.classes}
.film {{ animation: film {whole:.2f}s step-end infinite }}
.below {{ animation: below {whole:.2f}s step-end infinite }}
@keyframes film {{ {"".join(stops)} }}
@keyframes below {{ {"".join(below)} }}
@media (prefers-reduced-motion: reduce) {{
.film {{ animation: none; transform: translateY(-{middle * height}px) }}
.below {{ animation: none; transform: translateY(-{middle * BAR}px) }}
}}
</style>
<defs>
{drawing.lines}
</defs>
<rect width="{wide:g}" height="{high}" rx="8" fill="{GROUND}"/>
<circle cx="20" cy="17" r="6" fill="#ff5f57"/>
<circle cx="40" cy="17" r="6" fill="#febc2e"/>
<circle cx="60" cy="17" r="6" fill="#28c840"/>
<text class="title" x="{wide / 2:g}" y="22" text-anchor="middle">launch status --watch</text>
<svg x="{EDGE}" y="{BAR}" width="{wide - EDGE:g}" height="{height}"><g class="film">
{chr(10).join(film)}
</g></svg>
<svg x="{EDGE}" y="{BAR + height}" width="{wide - EDGE:g}" height="{BAR}"><g class="below">
{chr(10).join(said)}
</g></svg>
</svg>
"""


class _Drawing:
    """Lines and styles of all frames, each once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._styles: dict[str, str] = {}
        self._decoder = AnsiDecoder()
        self._console = Console(file=io.StringIO(), width=COLUMNS, color_system="truecolor")

    def line(self, row: str) -> str:
        """Return the name of a line."""
        if row not in self._names:
            self._names[row] = f"l{len(self._names)}"
            self._lines.append(f'<g id="{self._names[row]}">{"".join(self._parts(row))}</g>')
        return self._names[row]

    def _parts(self, row: str) -> Iterator[str]:
        at = 0
        for text, style, _ in self._decoder.decode_line(row).render(self._console):
            for word in re.finditer(r"\S+(?: \S+)*", text):
                x, length = WIDTH * (at + word.start()), WIDTH * len(word[0])
                place = f'x="{x:g}" y="{SIZE}" textLength="{length:g}"'
                yield f"<text {place}{self._styled(style)}>{escape(word[0])}</text>"
            at += len(text)

    def _styled(self, style: Style | None) -> str:
        css = _css(style) if style else ""
        if not css:
            return ""
        name = self._styles.setdefault(css, f"s{len(self._styles)}")
        return f' class="{name}"'

    @property
    def lines(self) -> str:
        """Return the definitions of all lines."""
        return "\n".join(self._lines)

    @property
    def classes(self) -> str:
        """Return the rules of all styles."""
        return "\n".join(f".{name} {{ {css} }}" for css, name in self._styles.items())


def _css(style: Style) -> str:
    """Return a style as CSS, in the colours of rich's own pictures."""
    theme = SVG_EXPORT_THEME
    colour = (style.color or Color.default()).get_truecolor(theme)
    if style.dim:
        colour = blend_rgb(colour, theme.background_color, 0.4)
    plain = colour == theme.foreground_color
    return "; ".join(
        ([] if plain else [f"fill: {colour.hex}"]) + (["font-weight: bold"] if style.bold else [])
    )


if __name__ == "__main__":
    sys.exit(main())
