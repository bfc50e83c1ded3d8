"""Motley's own installation on a host: `python -P -m launcher.installation install --wheel FILE`.

Runs straight from the wheel that it installs (on PYTHONPATH), as the user that owns the folder;
`versions.py` describes its layout. Progress goes to stderr, one JSON object to stdout.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, LauncherError, PreflightError
from launcher.installation import environments
from launcher.installation.versions import Installation
from launcher.session.processes import identify_process

BEGUN_SCHEMA = "motley.installation.begun/1"
RESULT_SCHEMA = "motley.installation.result/1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, roll back or show an installation; prints one JSON object."""
    os.umask(0o022)
    options = _argument_parser().parse_args(arguments)
    installation = Installation(options.root.absolute(), _report)
    if options.as_job:
        me = identify_process(os.getpid())
        assert me is not None
        _print_json({"schema": BEGUN_SCHEMA, **asdict(me)})
    try:
        tree = _run_action(installation, options)
    except (LauncherError, OSError) as problem:
        error = _as_launcher_error(problem)
        text = "\n".join([str(error), *error.details])
        sys.stderr.write(f"launcher.installation: {text}\n")
        failure = {"schema": "motley.error/1", "error": str(error), "details": error.details}
        _print_json({**failure, "exit_code": error.exit_code})
        return error.exit_code
    _print_json({"schema": RESULT_SCHEMA, **tree})
    return 0


def _as_launcher_error(problem: LauncherError | OSError) -> LauncherError:
    if isinstance(problem, LauncherError):
        return problem
    return PreflightError(f"{problem.filename or 'this host'}: {problem.strerror or problem}")


def _run_action(installation: Installation, options: argparse.Namespace) -> dict[str, Any]:
    if options.command == "show":
        return {
            **_describe_installation(installation, changed=False),
            "used_by": installation.find_users(),
        }
    if options.command == "rollback":
        with installation.lock():
            _refuse_if_used(installation, options.force)
            installation.roll_back()
        return _describe_installation(installation, changed=True)
    wheel = environments.read_wheel(options.wheel)
    extras, torch = _chosen_extras(installation, options)
    recipe = wheel.make_recipe(extras, torch)
    steps = installation.plan_install(wheel, recipe)
    if options.check:
        return {
            **_describe_installation(installation, changed=bool(steps)),
            "version": wheel.name_installation(recipe),
            "previous": installation.linked_version("current"),
            "steps": steps,
            "used_by": installation.find_users() if steps else [],
        }
    with installation.lock():
        if steps:
            _refuse_if_used(installation, options.force)
        changed = installation.install_wheel(wheel, recipe, options.torch_index)
    return {**_describe_installation(installation, changed), "steps": steps}


def _chosen_extras(
    installation: Installation, options: argparse.Namespace
) -> tuple[Sequence[str], str | None]:
    recorded = installation.recorded_choice()
    extras = options.extras.split(",") if options.extras else recorded and recorded[0]
    if extras is None:
        raise ConfigError(f"{installation.root}: nothing is installed yet; name --extras")
    return extras, options.torch or (recorded[1] if recorded else None)


def _refuse_if_used(installation: Installation, force: bool) -> None:
    if not force and (users := installation.find_users()):
        raise PreflightError(
            f"{installation.root}: a run uses it; stop it with launch cluster down, or --force",
            users,
        )


def _describe_installation(installation: Installation, changed: bool) -> dict[str, Any]:
    current = installation.linked_version("current")
    record = installation.read_record(current) if current else None
    return {
        "changed": changed,
        "version": current,
        "previous": installation.linked_version("previous"),
        "sha256": record["sha256"] if record else None,
    }


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launcher.installation", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="install a wheel and switch to it")
    install.add_argument("--wheel", type=Path, required=True)
    install.add_argument("--extras", help="trainer or coordinator; default: as installed now")
    install.add_argument("--torch", choices=("cpu", "cuda"), help="default: as installed now")
    install.add_argument("--torch-index", default=environments.TORCH_CPU_INDEX, metavar="URL")
    install.add_argument(
        "--check", action="store_true", help="change nothing, print what would change"
    )
    rollback = commands.add_parser("rollback", help="switch to the previous version")
    for command in (install, rollback):
        command.add_argument("--force", action="store_true", help="even while a run uses it")
    commands.add_parser("show", help="print what is installed")
    for command in commands.choices.values():
        # For a caller on another machine, which has nothing but the output.
        command.add_argument(
            "--as-job", action="store_true", help="print the identity of this process first"
        )
        command.add_argument("--root", type=Path, default=Path("/opt/motley"))
    return parser


def _print_json(tree: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(tree) + "\n")
    sys.stdout.flush()


def _report(line: str) -> None:
    sys.stderr.write(f"installation: {line}\n")
    sys.stderr.flush()
