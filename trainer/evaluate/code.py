"""pass@k: how often a model's code passes its tests (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.data.formats import read_records
from trainer.data.records import Problems
from trainer.evaluate.sandbox import Sandbox, Trial, TrialResult
from trainer.system.cgroups import count_processors
from trainer.system.errors import InputError

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""The end of a function: the paper's own, section 3.2."""
REPORTED = (1, 10, 100)
"""The k for which pass@k is reported, up to the number of samples."""


_KEYS = ("prompt", "test", "entry_point")


@dataclass(frozen=True)
class Problem:
    """A function to be completed."""

    prompt: str
    """Its head and docstring."""
    test: str
    """Source that defines `check(candidate)`, which raises if the function is wrong."""
    entry_point: str
    """The function's name."""

    def build_trial(self, completion: str) -> Trial:
        """Return the trial of a completion."""
        return Trial(
            program=f"{self.prompt}{completion[: _find_end(completion)]}\n",
            test=f"{self.test}\n\ncheck({self.entry_point})\n",
        )


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a data file; further keys are not read.

    Raises:
        InputError: the file cannot be read, is empty, or a line is not a problem.
    """
    problems: list[Problem] = []
    bad = Problems()
    for record in read_records(path, bad, {key: key for key in _KEYS}):
        if not isinstance(record.tree, dict):
            raise InputError(f"{record.location}: expected an object with {', '.join(_KEYS)}")
        prompt, test, name = (record.tree[key] for key in _KEYS)
        if not all(isinstance(value, str) for value in (prompt, test, name)):
            raise InputError(f"{record.location}: {', '.join(_KEYS)} must be strings")
        if not name.isidentifier():
            raise InputError(f"{record.location}: entry_point {name!r} is not a name")
        problems.append(Problem(prompt, test, name))
    bad.raise_if_any()
    if not problems:
        raise InputError(f"{path}: contains no problems, expected one JSON object per line")
    return problems


def run_trials(
    sandbox: Sandbox, trials: Sequence[Trial], threads: int | None = None
) -> list[TrialResult]:
    """Run trials, several at a time; none outlives this call, also on errors."""
    pool = ThreadPoolExecutor(threads or count_processors(os.cpu_count() or 1))
    try:
        return list(pool.map(sandbox.run, trials))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        sandbox.stop()


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k), equation 1 of the paper.

    Args:
        samples: n, of one problem; at least k.
        passed: c, those that passed.
    """
    assert 0 <= passed <= samples >= k > 0, (samples, passed, k)
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def compute_pass_rates(passed: Iterable[int], samples: int) -> dict[str, float]:
    """Return `pass@k` as the mean over problems with `samples` samples each.

    Args:
        passed: the passed samples of each problem.
    """
    counts = list(passed)
    return {
        f"pass@{k}": math.fsum(pass_at_k(samples, count, k) for count in counts) / len(counts)
        for k in REPORTED
        if k <= samples
    }


def _find_end(completion: str) -> int:
    places = (completion.find(stop) for stop in STOPS)
    return min((place for place in places if place >= 0), default=len(completion))
