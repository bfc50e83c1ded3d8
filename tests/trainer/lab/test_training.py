"""The experiments on training steps: what must hold on any machine, however busy."""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import pytest
import torch

from trainer.lab.experiment import Value
from trainer.lab.training import PeakMemory, compare_precisions

pytestmark = pytest.mark.long

Result = TypeVar("Result")
ARRAY = 32 << 20
"""Bytes."""


def number(row: Mapping[str, Value], column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float), f"{column}: {value}"
    return value


def alone(function: Callable[[], Result]) -> Result:
    """Call it in a process of its own: the peak counts what threads of earlier tests still take."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function).result()


def test_layers_computed_twice_give_the_same_loss_in_less_memory() -> None:
    # In a process of its own: what earlier tests freed may stay resident here, and is used again.
    command = [sys.executable, "-m", "trainer", "lab", "checkpointing", "--steps", "2", "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    kept, recomputed = json.loads(printed)["rows"]
    assert recomputed["last loss"] == kept["last loss"]
    assert number(recomputed, "peak MiB") < 0.8 * number(kept, "peak MiB")
    assert number(recomputed, "planned MiB") < number(kept, "planned MiB")


def test_sixteen_bits_keep_the_loss_near_that_of_fp32() -> None:
    fp32, bf16, fp16 = compare_precisions(seed=1, steps=2).rows
    assert fp32["of the first"] == 1
    assert bf16["last loss"] == pytest.approx(fp32["last loss"], rel=0.01)
    assert fp16["last loss"] == pytest.approx(fp32["last loss"], rel=0.01)
    assert bf16["last loss"] != fp32["last loss"]


def test_the_peak_is_that_of_what_was_there_at_once() -> None:
    three, nothing = alone(peaks_of_three_arrays_and_of_none)
    assert 0.9 * ARRAY < three < 1.5 * ARRAY
    assert nothing < ARRAY / 4


def peaks_of_three_arrays_and_of_none() -> tuple[int, int]:
    with PeakMemory(torch.device("cpu")) as three:
        for _ in range(3):  # one after the other
            torch.ones(ARRAY // 4)
    with PeakMemory(torch.device("cpu")) as nothing:
        pass
    assert three.bytes is not None
    assert nothing.bytes is not None
    return three.bytes, nothing.bytes


def test_what_was_freed_before_counts_when_it_is_used_again() -> None:
    assert alone(share_of_a_heap_that_is_used_again) > 0.9


def share_of_a_heap_that_is_used_again() -> float:
    def many() -> list[torch.Tensor]:
        return [torch.ones(16 << 10) for _ in range(256)]  # 64 KiB each, so of malloc's heap

    before, pin = many(), torch.ones(16 << 10)  # what lies above keeps the heap from shrinking
    del before
    with PeakMemory(torch.device("cpu")) as peak:
        again = many()
    assert peak.bytes is not None
    return peak.bytes / (len(again) * pin.nbytes)
