"""Start an agent on a host, or explain why none answers.

It runs as the run user, by the one sudo rule of the trainer role. Without that installation or
rule it runs as the operator, with the Python next to `motley_trainer_command`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.errors import LauncherError, PreflightError, UnreachableError
from launcher.hosts.rpc import NoAgentError
from launcher.inventory.hosts import Host

PYTHON = "/opt/motley/current/bin/python"
"""Of the trainer role's installation; the sudo rule names it."""

RUN_USER = "motley"

RECIPE = "ansible-playbook recipes/gpu-training.yml"

STARTED = "motley: started"
"""What it writes to stderr first: the login is done, and the login shell has started it."""

_SCRIPT = """
echo "STARTED" >&2;
p=$1; u=$2; t=$3;
if [ -x "$p" ]; then
  if [ "$(id -un)" = "$u" ]; then READY exec "$p" -P -m launcher.agent; fi;
  if why=$(sudo -n -l -u "$u" -- "$p" -P -m launcher.agent 2>&1); then
    if sudo -n -l /usr/local/sbin/motley-unit >/dev/null 2>&1; then echo "motley: units"; fi;
    READY exec sudo -n -u "$u" -- "$p" -P -m launcher.agent;
  fi;
  echo "motley: refused: $why";
else
  echo "motley: missing";
fi;
if [ -n "$t" ]; then
  c=$(command -v -- "$t");
  if [ -n "$c" ] && [ -x "${c%/*}/python" ]; then
    echo "motley: beside"; READY exec "${c%/*}/python" -P -m launcher.agent;
  fi;
  echo "motley: no python beside $t";
fi;
OTHERWISE
"""
"""Without line ends and single quotes: every login shell takes it, csh and fish included."""


def agent_command(
    host: Host, ready: str = "", otherwise: str = "exit 127", arguments: Sequence[str] = ()
) -> str:
    """Return the command of the operator's login shell; it prints `motley: ...` for each step.

    Args:
        ready: what the shell does before it becomes an installed agent.
        otherwise: what it does if there is none.
        arguments: `$4` and so on, for both.
    """
    trainer = host.trainer_command[0] if host.trainer_command else ""
    script = " ".join(_SCRIPT.split())
    for place, code in (("STARTED", STARTED), ("READY", ready), ("OTHERWISE", otherwise)):
        script = script.replace(place, code)
    return shlex.join(["sh", "-c", script, "sh", PYTHON, RUN_USER, trainer, *arguments])


def explain(host: Host, user: str, error: NoAgentError) -> LauncherError:
    """Return why there is no agent, from the output in place of its hello."""
    where = f"host {host.name}"
    marks: dict[str, str] = {}
    for word in error.words:
        if word.startswith("motley: "):
            mark, _, rest = word.removeprefix("motley: ").partition(": ")
            marks[mark] = rest
    others = [word for word in error.words if not word.startswith("motley: ")]
    if any("No module named" in word for word in others):
        return PreflightError(
            f"{where}: the Motley installed there has no agent: its version differs; run: "
            f"{RECIPE} --tags trainer"
        )
    beside = next((mark for mark in marks if mark.startswith("no python beside ")), "")
    last = f": {others[-1]}" if others and others[-1] not in str(error) else ""
    if "beside" in marks:
        return UnreachableError(f"{error}{last}")
    if "missing" in marks and beside:
        return PreflightError(
            f"{where}: no Motley at /opt/motley and {beside}; run: {RECIPE}, or correct "
            "motley_trainer_command"
        )
    if "missing" in marks:
        return PreflightError(f"{where}: no Motley at /opt/motley; run: {RECIPE}")
    if "refused" in marks:
        why = marks["refused"] or next(iter(others), "no rule allows it")
        return PreflightError(
            f"{where}: {user} may not become {RUN_USER} there ({why}); name {user} in "
            f"trainer_operators and run: {RECIPE} --tags trainer"
        )
    return UnreachableError(f"{error}{last}")
