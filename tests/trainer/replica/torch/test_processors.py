"""Threads for the processors that nothing else uses, and a line where a computation slows down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from trainer.replica.torch.processors import (
    INTERVAL,
    Processors,
    ProcessorUsage,
    SpeedWatch,
    count_usable_processors,
    read_usage,
)


class Machine:
    """A machine on which this process and others use so many processors."""

    def __init__(self) -> None:
        self.usage = ProcessorUsage(0.0, 50.0, 20.0, 3.0)

    def passes(self, own: float, others: float, seconds: float = INTERVAL) -> None:
        clock, busy, mine, stolen = self.usage
        self.usage = ProcessorUsage(
            clock + seconds, busy + (own + others) * seconds, mine + own * seconds, stolen
        )

    def look(self) -> ProcessorUsage:
        return self.usage


@pytest.mark.parametrize(
    ("others", "expected"),
    [(0.0, 4), (0.2, 4), (0.3, 3), (1.0, 3), (1.9, 2), (2.9, 1), (4.0, 1), (9.0, 1)],
)
def test_as_many_as_others_leave(others: float, expected: int) -> None:
    machine = Machine()
    processors = Processors(4, count=4, look=machine.look)
    assert processors.count_threads() == 4
    machine.passes(own=3.5, others=others)
    assert processors.count_threads() == expected
    machine.passes(own=1.0, others=0.0)
    assert processors.count_threads() == 4


def test_never_more_than_the_most() -> None:
    machine = Machine()
    processors = Processors(2, count=16, look=machine.look)
    machine.passes(own=1.0, others=3.0)
    assert processors.count_threads() == 2
    machine.passes(own=1.0, others=15.0)
    assert processors.count_threads() == 1


def test_it_looks_once_in_an_interval() -> None:
    machine = Machine()
    processors = Processors(2, count=2, look=machine.look)
    machine.passes(own=1.0, others=1.0, seconds=INTERVAL / 2)
    assert processors.count_threads() == 2
    machine.passes(own=1.0, others=1.0, seconds=INTERVAL / 2)
    assert processors.count_threads() == 1


@pytest.fixture
def busy() -> Iterator[int]:
    """Keep every processor busy with others' work."""
    count = count_usable_processors()
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    for loop in loops:
        assert loop.stdout
        loop.stdout.readline()
    yield count
    for loop in loops:
        loop.kill()
        loop.communicate()


@pytest.mark.cluster
def test_beside_real_processes(busy: int) -> None:
    processors = Processors(busy)
    began = read_usage()
    while (now := read_usage()).clock < began.clock + 1.5 * INTERVAL:
        pass  # as a computation does
    assert processors.count_threads() == 1
    assert 0 < now.own - began.own < now.busy - began.busy


def test_a_computation_that_slows_down_is_said_once() -> None:
    machine = Machine()
    watch = SpeedWatch(machine.look)
    said: list[str] = []

    def computes(speed: int, seconds: float) -> None:
        machine.passes(own=0.5, others=1.5, seconds=seconds)
        if line := watch.observe(int(speed * seconds), seconds):
            said.append(line)

    for speed in (9000, 9000, 2000, 9000):  # for a moment
        computes(speed, 6.0)
    assert said == []
    for _ in range(9):
        computes(800, 6.0)
    assert len(said) == 1
    assert said[0].startswith("computes 800 tokens/s, was 9,000: other processes use 1.5 of ")
    assert "0.0 are taken by the hypervisor" in said[0]


def test_nothing_to_compute_is_not_slow() -> None:
    watch = SpeedWatch(Machine().look)
    assert watch.observe(0, 1.0) is None
    assert watch.observe(100, 0.0) is None
