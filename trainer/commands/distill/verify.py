"""`trainer distill verify`: check every byte of a folder of logits or answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from trainer.system.commandline.options import PATH
from trainer.system.errors import StorageError


@click.command("verify")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--complete", is_flag=True, help="Treat missing shards as an error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(folder: Path, complete: bool, as_json: bool) -> None:
    """Read every byte of the logits or answers in DIR, and check that each occurs exactly once.

    Exit code 6 when a shard is damaged, or, with --complete, missing.
    """
    from trainer.distill.answers.shard_loader import open_shards
    from trainer.distill.logits.dataset import LogitsFolder
    from trainer.distill.logits.shard_folder import verify_shards

    logits = open_shards(folder)
    found = list(verify_shards(logits))
    states = Counter(verdict.state for verdict in found)
    wrong = [each for each in found if each.state == "damaged"]
    missing = [each.name for each in found if each.state == "missing"]
    if as_json:
        schema = "motley.logits.verification/1"
        summary = {
            "schema": schema,
            "shards": len(found),
            **{state: states[state] for state in _STATES},
        }
        click.echo(json.dumps(summary | {"verdicts": [asdict(each) for each in found]}))
    else:
        for each in wrong:
            click.echo(f"{each.name} is damaged: {each.reason}")
        if missing:
            click.echo(f"missing: {_summarize_names(missing)}")
        is_logits = isinstance(logits, LogitsFolder)
        sizes = {plan.number: plan.tokens if is_logits else plan.windows for plan in logits.plans}
        whole = sum(sizes[each.number] for each in found if each.state == "whole")
        total = sum(sizes.values())
        click.echo(
            f"{states['whole']} of {len(found)} shards are whole: {whole:,} of {total:,}"
            f" {'tokens' if is_logits else 'answers'}, each exactly once"
        )
    if wrong:
        names = ", ".join(each.name for each in wrong)
        raise StorageError(
            f"{folder}: damaged: {names}; the command that wrote them writes them again, with the"
            " same arguments"
        )
    if complete and missing:
        raise StorageError(f"{folder}: {len(missing)} of {len(found)} shards are missing")


_STATES = ("whole", "missing", "damaged")


def _summarize_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} shards, the first is {names[0]}"
