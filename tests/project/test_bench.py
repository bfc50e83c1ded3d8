"""Every line of `make bench` has the arguments that its benchmark needs."""

from __future__ import annotations

import argparse
import importlib
import shlex
import subprocess
import sys
from typing import Any

import pytest

from tests import ROOT


class ParsedError(Exception):
    """The arguments were read; nothing is measured."""


def listed() -> list[str]:
    """Return the commands, without running one."""
    done = subprocess.run(
        ("bash", "scripts/bench.sh", "--list"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_every_benchmark_is_run() -> None:
    files = {line.split()[0] for line in listed()}
    assert files == {f"benchmarks/{file.name}" for file in (ROOT / "benchmarks").glob("*.py")}


@pytest.mark.long
def test_every_line_is_accepted_by_its_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for line in listed():
        file, *words = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [file, *words])
        name = file.removeprefix("benchmarks/").removesuffix(".py")
        module = importlib.import_module(f"benchmarks.{name}")
        with pytest.raises(ParsedError):
            module.main()
