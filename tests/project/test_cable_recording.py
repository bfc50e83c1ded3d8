"""The recording in README.md: what a terminal showed, frame by frame, and nothing else."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from benchmarks.rig.interface import INTERFACE
from benchmarks.rig.network import ShapedNetwork, missing
from tests import ROOT
from tests.waiting import wait_for

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("cable_recording")


def drawn(picture: str) -> list[list[str]]:
    """Return the lines of each frame of a film."""
    root = ElementTree.fromstring(picture)
    lines = {
        line.attrib["id"]: " ".join(str(part.text) for part in line)
        for line in root.iter(f"{SVG}g")
        if "id" in line.attrib
    }
    (film,) = (each for each in root.iter(f"{SVG}g") if each.get("class") == "film")
    screen = next(each for each in root.iter(f"{SVG}svg") if each is not root)
    height = float(screen.attrib["height"])
    frames: dict[int, list[str]] = {}
    for use in film:
        frames.setdefault(int(float(use.attrib["y"]) // height), []).append(
            lines[use.attrib["href"][1:]]
        )
    return list(frames.values())


def test_what_a_live_view_draws_becomes_frames(
    recording: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing on a dumb one
    file, screen = io.StringIO(), recording.Screen()
    console = Console(file=file, force_terminal=True, width=30, color_system="truecolor")
    shown = (["one  <1>", "two"], ["one"], ["ä", "", "█▏", "c"])
    frames: list[Any] = []
    with Live(console=console, auto_refresh=False) as live:
        for number, lines in enumerate(shown):
            file.truncate(file.seek(0))
            live.update(Text("\n".join(lines), "bold red"), refresh=True)
            data = file.getvalue().replace("\n", "\r\n").encode()
            for at in range(0, len(data), 7):
                screen.feed(data[at : at + 7])
            assert [Text.from_ansi(row).plain for row in screen.rows] == lines
            frames.append(recording.Frame(float(number), screen.rows, "pulled" if number else ""))
    picture = recording.animation(frames)
    assert drawn(picture) == [["one <1>", "two"], ["one"], ["ä", "█▏", "c"]]
    (css,) = re.findall(r"\.s0 \{ (.*) \}", picture)
    assert "bold" in css
    assert picture.count(">pulled</text>") == 2
    assert "0.00%{transform:translateY(-0px)}" in picture
    assert "20.00%{transform:translateY(-72px)}" in picture  # 1 of 2 + 3 seconds, 4 lines high


def test_the_picture_of_the_documentation_shows_a_lost_worker_that_returns() -> None:
    text = (ROOT / "docs" / "cable.svg").read_text(encoding="utf-8")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-reduced-motion" in text
    frames = ["\n".join(lines) for lines in drawn(text)]
    said = [re.search(r"^worker-2 laptop \S+ (\w+)", frame, re.M) for frame in frames]
    states = [found[1] for found in said if found]
    assert len(states) == len(frames)
    assert list(dict.fromkeys(states))[:2] == ["active", "rejoining"]
    assert states[-1] == "active"
    steps = [int(found[1]) for frame in frames if (found := re.search(r"step (\d+)/", frame))]
    assert steps == sorted(steps)
    without = [step for step, state in zip(steps, states, strict=True) if state == "rejoining"]
    assert without[-1] > without[0], "the run goes on"


def test_a_cable_is_pulled_and_plugged_in_again() -> None:
    if reason := missing():
        pytest.skip(reason)
    with ShapedNetwork(2, 10**9) as network:

        def flags(host: int) -> list[str]:
            command = [*network.inside(host), "ip", "-j", "link", "show", "dev", INTERFACE]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return json.loads(done.stdout)[0]["flags"]

        wait_for(lambda: "LOWER_UP" in flags(1), "a cable")
        network.unplug(1)
        wait_for(lambda: "NO-CARRIER" in flags(1), "no cable")
        assert "LOWER_UP" in flags(0), "the other's"
        network.plug(1)
        wait_for(lambda: "LOWER_UP" in flags(1), "a cable again")
