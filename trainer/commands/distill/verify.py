"""`trainer distill verify`: check every byte of a folder of logits."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from trainer.system.commandline.together import PATH
from trainer.system.errors import StorageError


@click.command("verify")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--complete", is_flag=True, help="Treat missing shards as an error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(folder: Path, complete: bool, as_json: bool) -> None:
    """Read every byte of the logits in DIR and check that each token occurs exactly once.

    Exit code 6 when a shard is damaged, or, with --complete, missing.
    """
    from trainer.distill.logits.dataset import LogitsFolder
    from trainer.distill.logits.verify import verdicts

    logits = LogitsFolder(folder)
    found = list(verdicts(logits))
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
            click.echo(f"missing: {_ranges(missing)}")
        tokens = sum(
            logits.description.shards[each.number].tokens for each in found if each.state == "whole"
        )
        click.echo(
            f"{states['whole']} of {len(found)} shards are whole: {tokens:,} of "
            f"{logits.description.tokens:,} tokens, each exactly once"
        )
    if wrong:
        names = ", ".join(each.name for each in wrong)
        raise StorageError(
            f"{folder}: damaged: {names}; `trainer distill teacher` with the same arguments "
            "writes them again"
        )
    if complete and missing:
        raise StorageError(f"{folder}: {len(missing)} of {len(found)} shards are missing")


_STATES = ("whole", "missing", "damaged")


def _ranges(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} shards, the first is {names[0]}"
