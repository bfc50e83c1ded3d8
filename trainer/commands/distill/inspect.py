"""`trainer distill inspect`: what a folder of logits holds."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from trainer.distill.logits.dataset import LogitsFolder
    from trainer.distill.logits.description import Description
    from trainer.distill.logits.heartbeat import TeacherStatus
    from trainer.distill.logits.survey import Contents, LogitsSurvey

BAR = 40
"""Characters of the longest bar."""


@click.command("inspect")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=16,
    help="Number of shards whose distributions are read.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(folder: Path, sample: int, as_json: bool) -> None:
    """Show the format and amount of the logits in DIR, and which teachers are writing."""
    from trainer.distill.answers.shard_loader import open_logits
    from trainer.distill.logits.survey import survey_logits

    logits = open_logits(folder)
    found = survey_logits(logits, sample)
    plans = logits.plans
    planned = {
        "shards": len(plans),
        "windows": sum(plan.windows for plan in plans),
        "tokens": sum(plan.tokens for plan in plans),
    }
    teachers = _list_teachers(logits)
    if as_json:
        description = json.loads(logits.description.to_json())
        del description["shards"]
        tree = {
            **description,
            "schema": "motley.logits.inspection/2",
            "digest": logits.digest,
            "planned": planned,
            "found": asdict(found) | {"bytes_per_token": found.bytes_per_token},
            "teachers": [asdict(each.state) | {"silent_seconds": each.silent} for each in teachers],
        }
        click.echo(json.dumps(tree))
        return
    for line in _report(logits.description, planned, found, teachers):
        click.echo(line)


def _list_teachers(logits: LogitsFolder) -> list[TeacherStatus]:
    """Read the heartbeats twice, one interval apart, if one of them claims to be alive."""
    from trainer.distill.logits.heartbeat import INTERVAL, TeacherWatch

    watch = TeacherWatch(logits)
    if any(each.state.state in ("running", "waiting") for each in watch.list_teachers()):
        time.sleep(1.5 * INTERVAL)
    return watch.list_teachers()


def _report(
    description: Description,
    planned: dict[str, int],
    found: LogitsSurvey,
    teachers: list[TeacherStatus],
) -> list[str]:
    teacher, scheme = description.teacher, description.scheme
    computed = teacher.dtype
    if teacher.quantization != "none":
        computed = f"{teacher.quantization}, {computed}"
    if teacher.kl is not None:
        weights = f"{teacher.quantization} by {teacher.engine}"
        computed = f"{weights}, {teacher.kl:.2g} nats from transformers"
    kept = {
        "topk": f"top {scheme.top_k} and {scheme.tail_samples} draws from the tail",
        "sampled": f"{scheme.samples} draws",
        "full": "every token",
    }[scheme.kind]
    if scheme.removed_tokens == "first-piece":
        kept += ", removed tokens as their first token"
    lines = [
        f"{teacher.name} ({computed}): {kept} at temperature {scheme.temperature:g}, "
        f"{description.values}",
        f"vocabulary   {description.tokenizer.size:,} of {teacher.tokenizer_size:,} tokens "
        f"({teacher.vocab_size:,} with padding)",
        f"shards       {found.shards:,} of {planned['shards']:,}, "
        f"{len(found.requested)} requested, {found.quarantined} in quarantine",
        f"windows      {found.windows:,} of {planned['windows']:,}",
        f"tokens       {found.tokens:,} of {planned['tokens']:,}",
    ]
    if found.bytes_per_token is not None:
        lines.append(f"bytes        {found.bytes:,}, {found.bytes_per_token:.1f} a token")
    lines += [f"damaged      {reason}" for reason in found.damaged]
    if found.contents:
        lines += _describe_distributions(found.contents, scheme.kind == "topk")
    lines += [
        f"{name:12} {digest}"
        for name, digest in (
            ("teacher", teacher.digest),
            ("tokenizer", description.tokenizer.digest),
            ("corpus", description.corpus.digest),
            ("dataset", description.digest),
        )
    ]
    return lines + [_teacher_line(each) for each in teachers]


def _describe_distributions(contents: Contents, exact: bool) -> list[str]:
    lines = [
        f"{'kept mass' if exact else 'mass inside':12} {contents.kept_mass:.4f} on average over "
        f"{contents.positions:,} positions of {contents.shards} shards"
    ]
    most = max(1, *contents.histogram)
    for place, count in enumerate(contents.histogram):
        share = count / max(1, contents.positions)
        bar = "#" * round(BAR * count / most)
        lines.append(f"  {place / 10:.1f} to {(place + 1) / 10:.1f} {bar:{BAR}} {share:7.2%}")
    lines.append(
        f"{'a position':12} {contents.entries:.1f} entries, {contents.dropped_mass:.4f} outside"
        f" the vocabulary, entropy {contents.entropy:.3f} nats"
    )
    return lines


def _teacher_line(status: TeacherStatus) -> str:
    heartbeat = status.state
    line = (
        f"{heartbeat.name}: {heartbeat.state}, {heartbeat.shards_done} of {heartbeat.shards} shards"
    )
    if heartbeat.tokens_per_second:
        line += f", {heartbeat.tokens_per_second:,.0f} tokens/s"
    if heartbeat.reason:
        line += f": {heartbeat.reason}"
    if heartbeat.state in ("running", "waiting") and status.silent > 0:
        line += ", no recent heartbeat"
    return line
