"""The card of a run that has ended: its result, its cost, and the next commands.

Everything in it comes from the run's records: `metrics.jsonl` and the checkpoints.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from trainer.checkpoint.publication import publication_folder
from trainer.checkpoint.reader import FOLDER, linked_checkpoint, read_progress
from trainer.config.run import SCRIPT, RunConfig
from trainer.data.samples import iter_samples
from trainer.data.shapes import KeyCounts
from trainer.planning.resident_layers import list_residents
from trainer.system.errors import StorageError, TrainerError
from trainer.system.process.child import SAVING_VARIABLE
from trainer.tracking.metrics import METRICS_FILE, read_metrics
from trainer.tracking.progress import format_figures
from trainer.tracking.progress_picture import format_duration, loss_text

Record = Mapping[str, Any]
_ENDS = ("finished", "stopped")
_STARTS = ("listening", "resumed")


def make_card(config: RunConfig, run_id: str = "", *, stopped: bool = False) -> list[str]:
    """Return the lines of the card of the run in a config's output folder.

    Args:
        stopped: before its last step; the card then says how to continue.

    Unreadable parts are left out: a card never fails a run.
    """
    output = Path(config.output)
    try:
        records = read_metrics(output / METRICS_FILE, abandoned=True)
    except OSError:
        records = []
    joined = (record for record in records if record.get("event") in ("joined", "rejoined"))
    lines = [*_describe_duration(records, config.rate_unit), *list_residents(joined)]
    if lost := describe_losses(records):
        lines.append(f"lost and recovered: {', '.join(lost)}")
    if stopped:
        lines += ["stopped early; to continue:", f"  {_resume_command(config, run_id)}"]
    store = output / FOLDER
    for pointer in ("best", "latest"):
        found = linked_checkpoint(store, pointer)
        if found is not None:
            scores = _describe_scores(records, found)
            kind = "adapter" if config.method == "lora" else "model"
            if config.class_names is not None:
                lines.insert(0, f"classes: {shorten_text(', '.join(config.class_names))}")
            if (ready := publication_folder(config)).is_dir():
                tokenizer = "" if config.task == SCRIPT else "tokenizer and "
                lines.append(
                    f"to publish: {ready} (with {tokenizer}model card, without optimizer state)"
                )
            more = [] if config.task == SCRIPT else ["next:", *_next_commands(config)]
            return [f"{kind}: {store / pointer} ({scores})", *lines, *more]
    return lines


def shorten_text(text: str, limit: int = 100) -> str:
    """Return a text of at most so many characters."""
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def describe_losses(records: Sequence[Record]) -> list[str]:
    """Return what was lost in a run and how it was recovered, from all lines of its metrics."""
    events = [record for record in records if record.get("kind") == "event"]
    found: list[str] = []
    lost = Counter(_iter_losses(events))
    back = Counter(e.get("rank") for e in events if e.get("event") == "rejoined")
    for rank, times in sorted(lost.items()):
        returned = f"back {_format_times(back[rank])}" if back[rank] else "never back"
        found.append(f"worker {rank} lost {_format_times(times)}, {returned}")
    dealt = [e for e in events if e.get("event") == "reassigned"]
    if dealt:
        samples = sum(e.get("samples", 0) for e in dealt)
        found.append(f"{_format_count(samples, 'sample')} of lost workers computed by others")
    resumed = [e for e in events if e.get("event") == "resumed"]
    if resumed:
        repeated = _count_repeated(records)
        found.append(
            f"resumed {_format_times(len(resumed))}, {_format_count(repeated, 'step')} repeated"
        )
    alarms = sum(e.get("event") == "alarm" for e in events)
    if alarms:
        found.append(f"{_format_count(alarms, 'alarm')}, see {METRICS_FILE}")
    return found


def sum_seconds(records: Sequence[Record]) -> float:
    """Return how long a run worked, without the time between an end and the next start."""
    total = 0.0
    for before, after in pairwise(records):
        if before.get("event") not in _ENDS and after.get("event") not in _STARTS:
            total += max(0.0, after.get("time", 0.0) - before.get("time", 0.0))
    return total


def mean_speed(records: Sequence[Record]) -> float | None:
    """Return the tokens a second of a run's steps, weighted by their time; None if unknown."""
    tokens = seconds = 0.0
    for before, after in pairwise(records):
        speed = after.get("tokens_per_second")
        if after.get("kind") == before.get("kind") == "step" and speed is not None:
            took = max(0.0, after.get("time", 0.0) - before.get("time", 0.0))
            tokens, seconds = tokens + speed * took, seconds + took
    return tokens / seconds if seconds else None


def _resume_command(config: RunConfig, run_id: str) -> str:
    """Return the command that continues a run: the launcher's, or this process's own again."""
    arguments = sys.argv[1:]
    if os.environ.get(SAVING_VARIABLE):
        kind = "distill" if arguments[:1] == ["distill"] else "cluster"
        script = " --script FILE" if config.task == SCRIPT else ""
        return f"launch {kind} up --resume {run_id}{script}"
    return shlex.join([*_program_words(), *arguments])


def _iter_losses(events: Sequence[Record]) -> Iterator[int]:
    """Yield the rank of each loss; a worker that leaves a stopped run is not lost."""
    stopping = False
    for event in events:
        if event.get("event") in ("stopping", *_STARTS):
            stopping = event["event"] == "stopping"
        elif event.get("event") == "lost" and not stopping:
            yield event.get("rank", 0)


def _describe_duration(records: Sequence[Record], unit: str) -> list[str]:
    steps = [record for record in records if record.get("kind") == "step"]
    if all(step.get("loss") is None for step in steps):
        return []
    last = steps[-1]
    speed = mean_speed(records)
    rate = f", {speed:,.0f} {unit}/s" if speed else ""
    return [
        f"step {last['step']}, {loss_text(last)}, in {format_duration(sum_seconds(records))}{rate}"
    ]


def _describe_scores(records: Sequence[Record], checkpoint: Path) -> str:
    """Return the step of a checkpoint and its validation's figures."""
    try:
        step = read_progress(checkpoint).step
    except StorageError:
        return checkpoint.name
    rated = [r for r in records if r.get("kind") == "validation" and r.get("step") == step]
    rated = [r for r in rated if r.get("loss") is not None]  # null: not finite
    return ", ".join([f"step {step}", *(format_figures(rated[-1]) if rated else ())])


def _count_repeated(records: Sequence[Record]) -> int:
    """Return how many steps were computed again after a resumption."""
    applied, repeated = 0, 0
    for record in records:
        if record.get("kind") == "step":
            repeated += record["step"] <= applied
            applied = max(applied, record["step"])
    return repeated


def _next_commands(config: RunConfig) -> list[str]:
    """Return the next commands, for a shell in this folder."""
    output, commands = config.output, list[list[str]]()
    data = config.data.validation or config.data.train
    # Not a folder of a teacher's logits, and no pairs.
    if Path(data).is_file() and config.task != "dpo":
        held_out = ["--held-out"] if config.data.validation_fraction else []
        commands.append(["evaluate", output, "--data", data, *held_out])
    if config.task != "classify":
        commands.append(["generate", output, _prompt_option(config), "Hello"])
    if config.method == "lora":
        commands.append(["merge", output, "-o", str(Path(output) / "merged")])
    return [f"  {shlex.join([*_program_words(), *command])}" for command in commands]


def _prompt_option(config: RunConfig) -> str:
    """Return the option of `generate` that asks as the run's data does."""
    try:
        pairs, data = config.task == "dpo", config.data
        keys = KeyCounts(pairs=pairs)
        samples = iter_samples(Path(data.train), None, keys, data.columns, pairs=pairs)
        talks = any(bool(sample.messages) for _, sample in islice(samples, 1))
    except TrainerError:  # a teacher's logits, or moved data
        talks = False
    return "--chat" if talks else "--prompt"


def _program_words() -> list[str]:
    """Return the command that calls this program."""
    script = Path(sys.executable).with_name("trainer")
    if not script.exists():
        return [sys.executable, "-P", "-m", "trainer.cli"]
    found = shutil.which("trainer")
    return ["trainer"] if found and Path(found).samefile(script) else [str(script)]


def _format_times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
