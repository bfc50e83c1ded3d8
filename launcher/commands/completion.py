"""Shell completion of values: runs, processes, hosts, presets and the keys of settings.

These functions run on every press of Tab: they print nothing, and an error means no suggestions.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

Offer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _without_errors(names: Callable[[click.Context], list[str]]) -> Offer:
    """Return a completion that offers the names that begin with the typed text."""

    @functools.wraps(names)
    def offer(context: click.Context, _: click.Parameter, text: str) -> list[CompletionItem]:
        found: list[str] = []
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
            found = names(context)
        return [CompletionItem(name) for name in found if name.startswith(text)]

    return offer


def _or_files(offer: Offer) -> Offer:
    def offer_with_files(
        context: click.Context, parameter: click.Parameter, text: str
    ) -> list[CompletionItem]:
        return [CompletionItem(text, type="file"), *offer(context, parameter, text)]

    return offer_with_files


def _local_runs() -> list[Any]:
    """Return the runs that this machine has a record of: a press of Tab asks no host."""
    from launcher.runs.records.registry import Registry

    return Registry.for_this_user().read_runs()


@_without_errors
def run_ids(_: click.Context) -> list[str]:
    """Offer the runs that this machine knows, the latest first."""
    return [run.run_id for run in reversed(_local_runs())]


@_without_errors
def queued_ids(context: click.Context) -> list[str]:
    """Offer what waits in the queue or is over, the latest first."""
    from launcher.runs.queue import open_queue

    entries, _ = open_queue(context.params.get("inventory"))[0].read_entries()
    return [entry.id for entry in reversed(entries) if entry.state != "started"]


@_without_errors
def process_names(context: click.Context) -> list[str]:
    """Offer the processes of the run that is named, else of the latest."""
    runs = _local_runs()
    named = [run for run in runs if run.run_id == context.params.get("run_id")]
    return [process.name for process in (named or runs)[-1].plan.processes]


@_without_errors
def host_names(context: click.Context) -> list[str]:
    """Offer the hosts of the inventory."""
    from launcher.runs.cluster import Cluster

    source = context.params.get("inventory")
    return [host.name for host in Cluster(source).hosts] if source is not None else []


@_without_errors
def preset_names(_: click.Context) -> list[str]:
    """Offer the shipped run configs."""
    from trainer.config import run as run_config

    return list(run_config.list_presets())


@_without_errors
def setting_keys(_: click.Context) -> list[str]:
    """Offer the settings of a run config, for KEY=VALUE."""
    from trainer.config import run as run_config

    return [f"{key}=" for key in run_config.setting_keys()]


@_without_errors
def _job_presets(_: click.Context) -> list[str]:
    from trainer.config import distill_job

    return list(distill_job.list_presets())


job_presets = _or_files(_job_presets)
"""Offers the shipped distillations, and files."""


@_without_errors
def job_keys(_: click.Context) -> list[str]:
    """Offer the settings of a distillation, for KEY=VALUE."""
    from trainer.config import distill_job

    return [f"{key}=" for key in distill_job.setting_keys()]
