"""The tasks of an eval runner, from their names on the command line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.trained_model import TrainedModel
from trainer.data.samples import read_prompts
from trainer.data.shapes import Sample
from trainer.data.sources import find_data
from trainer.evaluate.base import Outcome, Task
from trainer.evaluate.code import Problem, compute_pass_rates, read_problems, run_trials
from trainer.evaluate.generation import Completion, complete_samples
from trainer.evaluate.sandbox import Sandbox
from trainer.evaluate.scoring import score_file
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError

HARNESS = "lm-eval:"


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The data and options of the tasks; each uses its own part."""

    data: Sequence[Path] = ()
    columns: Mapping[str, str] | None = None
    """The names of keys in data and prompts; None: their own, or the run's if data has them."""
    prompts: Path | None = None
    problems: Path | None = None
    run_code: bool = False
    samples: int = 1
    """Samples of each problem."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    harness_tasks: Path | None = None
    """A folder with tasks of lm-eval's own YAML."""
    harness_limit: int | None = None
    """Samples of each lm-eval task, None for all."""

    def complete_samples(
        self, trained: TrainedModel, samples: Sequence[Sample], compute: Compute
    ) -> list[Completion]:
        """Return what a model makes of prompts."""
        return complete_samples(
            trained, samples, self.max_new_tokens, Sampling(self.temperature), compute
        )


def make_tasks(names: str, material: TaskOptions) -> list[Task]:
    """Return the tasks of a list such as `loss,generate,lm-eval:arc_easy`, in its order.

    Raises:
        InputError: a name is unknown or repeated, or a task lacks an option.
    """
    chosen = [name.strip() for name in names.split(",")]
    if repeated := {name for name in chosen if chosen.count(name) > 1}:
        raise InputError(f"--tasks: {min(repeated)!r} twice")
    return [_make_task(name, material) for name in chosen]


def _make_task(name: str, material: TaskOptions) -> Task:
    if name.startswith(HARNESS):
        from trainer.evaluate.harness import Harness

        task = name.removeprefix(HARNESS)
        return Harness(task, material.harness_tasks, material.harness_limit)
    kinds = {kind.name: kind for kind in (Loss, Generate, Code)}
    if name not in kinds:
        raise InputError(f"--tasks: {name!r} unknown; use loss, generate, code or {HARNESS}NAME")
    return kinds[name](material)


class Loss:
    """Loss and perplexity of a language model, or loss, accuracy and MCC of a classifier."""

    name = "loss"

    def __init__(self, material: TaskOptions) -> None:
        if not material.data:
            raise InputError("task loss: give --data FILE")
        for path in material.data:
            find_data(path)
        stems = [path.stem for path in material.data]
        if len(set(stems)) < len(stems):
            raise InputError("task loss: two files of --data have the same name")
        self._data, self._columns = material.data, material.columns

    def run(self, trained: TrainedModel, compute: Compute) -> Outcome:
        """Return the figures of each file, with the file's name if there are several."""
        found: dict[str, float] = {}
        rated_by = ""
        for path in self._data:
            scores = score_file(trained, path, compute, columns=self._columns)
            prefix = f"{path.stem}/" if len(self._data) > 1 else ""
            for name in ("loss", "perplexity", "accuracy", "mcc"):
                if (value := getattr(scores, name)) is not None:
                    found[prefix + name] = value
            # As a run ranks its own validations.
            rated_by = rated_by or prefix + ("loss" if scores.accuracy is None else "accuracy")
        return Outcome(found, rated_by, falling=rated_by.endswith("loss"))


class Generate:
    """Continuations of a few prompts, for people to read."""

    name = "generate"

    def __init__(self, material: TaskOptions) -> None:
        if material.prompts is None:
            raise InputError("task generate: give --prompts FILE")
        self._prompts = read_prompts(material.prompts, material.columns)
        self._material = material

    def run(self, trained: TrainedModel, compute: Compute) -> Outcome:
        """Return the texts, their mean length and how many the model ended itself."""
        made = self._material.complete_samples(trained, self._prompts, compute)
        counted = {
            "tokens": statistics.fmean(completion.tokens for completion in made),
            "ended": statistics.fmean(completion.ended for completion in made),
        }
        return Outcome(counted, samples=[vars(completion) for completion in made])


class Code:
    """pass@k over problems, in the sandbox."""

    name = "code"

    def __init__(self, material: TaskOptions) -> None:
        if material.problems is None:
            raise InputError("task code: give --problems FILE")
        if not material.run_code:
            raise InputError("task code runs code that the model writes: allow it with --run-code")
        if material.samples > 1 and material.temperature == 0:
            raise InputError("task code: --samples would all be the same, give --temperature")
        self._problems: list[Problem] = read_problems(material.problems)
        self._sandbox = Sandbox()
        self._material = material

    def run(self, trained: TrainedModel, compute: Compute) -> Outcome:
        """Return pass@k, and for each problem one sample and why it failed."""
        asked = [problem for problem in self._problems for _ in range(self._material.samples)]
        prompts = [Sample(problem.prompt) for problem in asked]
        made = self._material.complete_samples(trained, prompts, compute)
        texts = [completion.text for completion in made]
        trials = [problem.build_trial(text) for problem, text in zip(asked, texts, strict=True)]
        verdicts = run_trials(self._sandbox, trials, compute.threads)
        firsts = range(0, len(asked), self._material.samples)
        passed = [
            sum(verdict.passed for verdict in verdicts[first : first + self._material.samples])
            for first in firsts
        ]
        shown = [
            {
                "entry_point": asked[first].entry_point,
                "passed": count,
                "text": texts[first],
                "reason": verdicts[first].reason,
            }
            for first, count in zip(firsts, passed, strict=True)
        ]
        return Outcome(compute_pass_rates(passed, self._material.samples), "pass@1", samples=shown)
