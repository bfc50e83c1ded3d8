"""Start an agent on a host, or explain why none answers.

It runs as the run user, by the one sudo rule of the trainer role. Without that installation or
rule it runs as the operator, with the Python next to `motley_trainer_command`, or as a visitor:
its code (`agent/archive.py`) is sent over the login.
"""

from __future__ import annotations

import re
import shlex

from launcher.agent.archive import LEAST_PYTHON, RUN, agent_archive
from launcher.errors import LauncherError, PreflightError
from launcher.hosts.remote import NO_UNITS_MARK, UNITS_MARK
from launcher.hosts.rpc import STARTED, NoAgentError
from launcher.inventory.hosts import Host

PYTHON = "/opt/motley/current/bin/python"
"""Path in the trainer role's installation; the sudo rule names it."""

RUN_USER = "motley"

RECIPE = "ansible-playbook recipes/gpu-training.yml"

_SUDO = "motley: sudo"
"""A line before the hello: sudo has been asked to start the agent."""

_UNIT_COMMAND = "/usr/local/sbin/motley-unit"

_SCRIPT = """
echo "STARTED"; echo "STARTED" >&2;
p=$1; u=$2; t=$3;
INSTALLED
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

_INSTALLED = f"""
if [ -x "$p" ]; then
  if [ "$(id -un)" = "$u" ]; then READY exec "$p" -P -m launcher.agent; fi;
  if [ -x {_UNIT_COMMAND} ]; then
    why=$(sudo -n {_UNIT_COMMAND} 2>&1 </dev/null);
    if [ $? -eq 2 ]; then echo "{UNITS_MARK}"; else set -f; echo "{NO_UNITS_MARK}" $why; fi;
  fi;
  echo "{_SUDO}"; READY exec sudo -n -u "$u" -- "$p" -P -m launcher.agent;
fi;
echo "motley: missing";
"""
"""Only the call itself shows what sudo does: `sudo -l` lists a command that needs a password too.
Without arguments motley-unit does nothing and ends with 2, sudo with 1."""


_SKIP = 'head -c "$5" >/dev/null;'
"""An installed agent needs no code, which has been sent all the same: one login suffices."""

VISITS = "motley: visits"
_VISIT = f'echo "{VISITS}"; exec python3 -I -c "$4" "$5"'


def agent_command(host: Host, visiting: bool = False, is_refused: bool = False) -> str:
    """Return the command of the operator's login shell; it prints `motley: ...` for each step.

    If it is `visiting`, it first reads the archive, which it runs if no agent is installed, or if
    sudo does not start that one (`is_refused`).
    """
    trainer = host.trainer_command[0] if host.trainer_command else ""
    ready, otherwise = (_SKIP, _VISIT) if visiting else ("", "exit 127")
    script = " ".join(_SCRIPT.split())
    installed = "" if is_refused else " ".join(_INSTALLED.split())
    parts = {"INSTALLED": installed, "STARTED": STARTED, "READY": ready, "OTHERWISE": otherwise}
    for place, code in parts.items():
        script = script.replace(place, code)
    code = (RUN, str(len(agent_archive()))) if visiting else ()
    return shlex.join(["sh", "-c", script, "sh", PYTHON, RUN_USER, trainer, *code])


def sudo_refusal(error: NoAgentError) -> str:
    """Return sudo's reason for not starting the agent; empty if that is not what failed."""
    if not error.has_ended or _SUDO not in error.details:
        return ""
    after = error.details[error.details.index(_SUDO) + 1 :]
    words = [word for word in after if not word.startswith("motley: ")]
    if any(re.search(_NOT_SUDO, word) for word in words):
        return ""
    return words[-1].strip() if words else ""


_NOT_SUDO = r"No module named|^Traceback|^Fatal Python|loading shared libraries|^\S*/python: "
"""The installed Python's own words: sudo has started it."""


def explain_failure(host: Host, user: str, error: NoAgentError) -> LauncherError:
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
            "install Motley there first (the recipe installs a Python), with an inventory written "
            "by "
            "hand"
        )
    if any(re.search(r"python3: (command )?not found", word) for word in others):
        return PreflightError(f"{where}: python3 is not installed; run there: apt install python3")
    if any("No module named" in word for word in others):
        return PreflightError(
            f"{where}: the Motley installed there has no agent: its version differs; run: "
            f"{RECIPE} --tags trainer"
        )
    if "beside" in marks or VISITS in error.details:
        return error.as_reported()
    if "missing" in marks:
        beside = next((f" and {mark}" for mark in marks if mark.startswith("no python")), "")
        hint = ", or correct motley_trainer_command" if beside else ""
        return PreflightError(
            f"{where}: Motley is not installed at /opt/motley{beside}; run: {RECIPE}{hint}"
        )
    if why := marks.get("refused", "") or sudo_refusal(error):
        return PreflightError(
            f"{where}: {user} may not become {RUN_USER} there ({why}); name {user} in "
            f"trainer_operators and run: {RECIPE} --tags trainer"
        )
    return error.as_reported()
