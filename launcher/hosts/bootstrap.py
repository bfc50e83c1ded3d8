"""Start an agent on a host, or explain why none answers.

It runs as the run user, by the one sudo rule of the trainer role. Without that installation or
rule it runs as the operator, with the Python next to `motley_trainer_command`, or as a visitor:
its code (`agent/archive.py`) is sent over the login.
"""

from __future__ import annotations

import re
import shlex

from launcher.agent.archive import LEAST_PYTHON, RUN, archive
from launcher.errors import LauncherError, PreflightError
from launcher.hosts.rpc import STARTED, NoAgentError
from launcher.inventory.hosts import Host

PYTHON = "/opt/motley/current/bin/python"
"""Of the trainer role's installation; the sudo rule names it."""

RUN_USER = "motley"

RECIPE = "ansible-playbook recipes/gpu-training.yml"

_SCRIPT = """
echo "STARTED"; echo "STARTED" >&2;
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


_SKIP = 'head -c "$5" >/dev/null;'
"""An installed agent needs no code, which has been sent all the same: one login suffices."""

VISITS = "motley: visits"
_VISIT = f'echo "{VISITS}"; exec python3 -I -c "$4" "$5"'


def agent_command(host: Host, visiting: bool = False) -> str:
    """Return the command of the operator's login shell; it prints `motley: ...` for each step.

    If it is `visiting`, it first reads the archive, which it runs if no agent is installed.
    """
    trainer = host.trainer_command[0] if host.trainer_command else ""
    ready, otherwise = (_SKIP, _VISIT) if visiting else ("", "exit 127")
    script = " ".join(_SCRIPT.split())
    for place, code in (("STARTED", STARTED), ("READY", ready), ("OTHERWISE", otherwise)):
        script = script.replace(place, code)
    code = (RUN, str(len(archive()))) if visiting else ()
    return shlex.join(["sh", "-c", script, "sh", PYTHON, RUN_USER, trainer, *code])


def explain(host: Host, user: str, error: NoAgentError) -> LauncherError:
    """Return why there is no agent, from the output in place of its hello."""
    where = f"host {host.name}"
    marks: dict[str, str] = {}
    others: list[str] = []
    for word in error.details:
        if word.startswith("motley: "):
            mark, _, rest = word.removeprefix("motley: ").partition(": ")
            marks[mark] = rest
        else:
            others.append(word)
    if found := next((mark for mark in marks if mark.startswith("python ")), ""):
        wanted = ".".join(map(str, LEAST_PYTHON))
        return PreflightError(
            f"{where}: its python3 is {found.removeprefix('python ')}, querying it needs {wanted}; "
            "install Motley there first (the recipe brings a Python), with an inventory written by "
            "hand"
        )
    if any(re.search(r"python3: (command )?not found", word) for word in others):
        return PreflightError(f"{where}: there is no python3; install it: apt install python3")
    if any("No module named" in word for word in others):
        return PreflightError(
            f"{where}: the Motley installed there has no agent: its version differs; run: "
            f"{RECIPE} --tags trainer"
        )
    if "beside" in marks or VISITS in error.details:
        return error.quoted()
    if "missing" in marks:
        beside = next((f" and {mark}" for mark in marks if mark.startswith("no python")), "")
        hint = ", or correct motley_trainer_command" if beside else ""
        return PreflightError(f"{where}: no Motley at /opt/motley{beside}; run: {RECIPE}{hint}")
    if "refused" in marks:
        why = marks["refused"] or next(iter(others), "no rule allows it")
        return PreflightError(
            f"{where}: {user} may not become {RUN_USER} there ({why}); name {user} in "
            f"trainer_operators and run: {RECIPE} --tags trainer"
        )
    return error.quoted()
