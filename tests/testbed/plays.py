"""A play's words, and what it says of itself: which tasks changed something, on which host."""

from __future__ import annotations

import re

from tests.testbed.processes import Completed


def tagged(*tags: str) -> tuple[str, ...]:
    """Return the words that play these tags of the recipe, and no refusals."""
    return "recipes/gpu-training.yml", "--tags", ",".join(tags), "--skip-tags", "validate"


def changed(done: Completed) -> dict[str, int]:
    """Return how many tasks changed something, by host."""
    recap = re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", done.stdout, re.MULTILINE)
    return {host: int(count) for host, count in recap}


def changing_tasks(done: Completed) -> str:
    """Return the tasks that changed something, for the message of an assert."""
    found: list[str] = []
    task = ""
    for line in done.stdout.splitlines():
        task = line if line.startswith(("TASK", "RUNNING HANDLER")) else task
        if line.startswith("changed:"):
            found.append(f"{task} {line}")
    return "\n".join(found)
