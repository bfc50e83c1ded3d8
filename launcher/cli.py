"""`launch`: control a cluster of mismatched computers from one terminal."""

from __future__ import annotations

import json
import os
import sys
import traceback

import click

from launcher.errors import EXIT_CODES, ConfigError, InterruptedStartError, LauncherError
from launcher.terminal import sanitize_text
from trainer import __version__
from trainer.system.commandline.lazy_group import LazyGroup
from trainer.system.commandline.streams import end_output, print_any_text
from trainer.system.errors import describe_host_fault

_CLUSTER = "launcher.commands.cluster"

cluster = LazyGroup(
    name="cluster",
    help="Start a run, stop it, update Motley.",
    commands_at={
        "up": (f"{_CLUSTER}:up", "Start a run; return once every worker has joined."),
        "down": (f"{_CLUSTER}:down", "Stop the run and check that nothing is left."),
        "push": ("launcher.commands.push:push", "Update Motley on every host."),
    },
)

_DISTILL = "launcher.commands.distill"

distill = LazyGroup(
    name="distill",
    help="Train a small model on the outputs of a large one; status, logs and down as for any run.",
    commands_at={
        "up": (f"{_DISTILL}:up", "Start a distillation; return once every process is running."),
        "doctor": (f"{_DISTILL}:doctor", "Check whether the hosts are ready for it."),
    },
)

_QUEUE = "launcher.commands.queue"

queue = LazyGroup(
    name="queue",
    help="Run one job after another on the hosts of a cluster.",
    commands_at={
        "add": (f"{_QUEUE}:add", "Add a run to the queue."),
        "list": (f"{_QUEUE}:list_queue", "List waiting, running and finished runs."),
        "remove": (f"{_QUEUE}:remove", "Remove a waiting or finished run."),
        "run": (f"{_QUEUE}:run", "Run the queue, one run after another."),
    },
)

_SYNC = "launcher.commands.sync"

sync = LazyGroup(
    name="sync",
    help="Move models, data, logits and checkpoints between this machine and the hosts.",
    commands_at={
        "inputs": (f"{_SYNC}:inputs", "Copy models and data to every host."),
        "logits": (f"{_SYNC}:logits", "Copy a teacher's logits to hosts without a shared folder."),
        "checkpoints": (f"{_SYNC}:checkpoints", "Fetch checkpoints from the coordinator's host."),
    },
)

cli = LazyGroup(
    name="launch",
    help="Start, watch and stop training runs over the computers you own.",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"Exit codes: {', '.join(f'{code} {row[0]}' for code, row in EXIT_CODES.items())}.",
    commands_at={
        "cluster": ("launcher.cli:cluster", "Start a run, stop it, update Motley."),
        "distill": ("launcher.cli:distill", "Train a small model on the outputs of a large one."),
        "init": ("launcher.commands.init:init", "Write a commented run config to edit."),
        "status": (f"{_CLUSTER}:status", "Show the active run, or the latest one."),
        "logs": ("launcher.commands.logs:logs", "Print the logs of processes, such as worker-2."),
        "dashboard": (
            "launcher.commands.dashboard:dashboard",
            "Show the cluster and its runs in a browser.",
        ),
        "report": ("launcher.commands.report:report", "Write the report of a run as one file."),
        "runs": ("launcher.commands.runs:runs", "List the runs of a cluster."),
        "queue": ("launcher.cli:queue", "Run one job after another."),
        "sync": ("launcher.cli:sync", "Move models, data, logits and checkpoints."),
        "plan": ("launcher.commands.plan:plan", "Plan memory, time and cost of each strategy."),
        "discover": (
            "launcher.commands.discover:discover",
            "Find machines and write an inventory.",
        ),
        "spend": ("launcher.commands.spend:spend", "Show what runs have cost."),
        "budget": ("launcher.commands.spend:budget", "Run a command under a cost ceiling."),
        "doctor": ("launcher.commands.doctor:doctor", "Check whether the hosts are ready."),
        "export": (
            "launcher.commands.export:export",
            "Export a run to Slurm, SkyPilot and others.",
        ),
        "certificates": (
            "launcher.commands.certificates:certificates",
            "Write certificates for a run started by hand.",
        ),
        "completion": ("trainer.system.commandline.completion:launch", "Print shell completion."),
    },
)


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"motley {__version__}")
        context.exit()


cli.params.append(
    click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_print_version,
        help="Show the version and exit.",
    )
)


def main() -> None:
    """Run the command line and exit; every error becomes a line and an exit code here."""
    print_any_text()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code (see launcher/errors.py)."""
    try:
        result = cli.main(arguments, prog_name="launch", standalone_mode=False)
        sys.stdout.flush()
    except LauncherError as error:
        return _fail(arguments, str(error), error.exit_code, error.details)
    except click.ClickException as error:
        from trainer.config.usage import usage_line

        return _fail(arguments, usage_line(error, arguments, _list_setting_keys), 2)
    except (click.Abort, KeyboardInterrupt):
        return InterruptedStartError.exit_code
    except BrokenPipeError:
        end_output()  # its reader has closed it
        return 0
    except Exception as error:  # a defect: people get one line, developers the traceback
        if fault := describe_host_fault(error):
            end_output()
            return _fail([], fault, ConfigError.exit_code)
        if os.environ.get("MOTLEY_DEBUG"):
            for text in traceback.format_exc().splitlines():
                sys.stderr.write(f"{sanitize_text(text)}\n")
        hint = "set MOTLEY_DEBUG=1 for the traceback"
        return _fail(arguments, f"a defect in Motley: {type(error).__name__}: {error} ({hint})", 1)
    return result if isinstance(result, int) else 0


def _list_setting_keys(options: list[str]) -> list[str]:
    from trainer.config import distill_job
    from trainer.config import run as run_config

    if "--set" not in options:
        return []
    return distill_job.setting_keys() if "--teacher" in options else run_config.setting_keys()


def _fail(arguments: list[str], message: str, code: int, details: tuple[str, ...] = ()) -> int:
    line = " ".join(message.split())
    sys.stderr.write("".join(f"launch: {sanitize_text(text)}\n" for text in (line, *details)))
    if "--json" in arguments:
        tree = {"schema": "motley.error/1", "error": line, "details": details, "exit_code": code}
        try:
            sys.stdout.write(json.dumps(tree) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            end_output()
    return code


if __name__ == "__main__":
    main()
