"""The state of a host as lines of text: files, accounts, packages, units, and what daemons do.

Two hosts of one name and address that went through the same have the same lines.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.testbed.host import Host
from tests.testbed.lab import Lab

FOLDERS = ["/etc", "/usr/local", "/opt", "/srv", "/var/lib/motley"]
ITS_OWN = re.compile(
    r"/etc/(machine-id|ld\.so\.cache|\S+-|ssh/ssh_host_\S+|ssl/certs/java|\.pwd\.lock)$"
    r"|\.pyc$|/__pycache__$|/\.lock$"
)
"""Files that a host makes up itself, or that hold a time."""
FLEETING = re.compile(
    r"^(user|session|run-user|systemd-(hostnamed|timedated|tmpfiles)|apt-|dpkg-|e2scrub|motley-share\.service)"
)
"""Units that come and go by themselves."""
BACKUP = re.compile(r"\.\d+\.\d{4}-\d\d-\d\d@\d\d:\d\d:\d\d~")
"""What Ansible appends to the name of a file that it keeps: a process and a time."""
TRIGGERED = re.compile(r"^(unit \S+\.timer active) running$")
"""A timer whose service runs at this moment; it waits at others."""
SCRIPT = Path(__file__).with_name("state_of_host.sh")


def state(lab: Lab, host: Host) -> list[str]:
    """Return the lines that describe a host, sorted within each part."""
    script = SCRIPT.read_text(encoding="utf-8")
    shown = host.exec(["sh", "-s", *FOLDERS], input=script, timeout=300).stdout
    lasting = (line for line in shown.splitlines() if not _fleeting(line))
    lines = [TRIGGERED.sub(r"\1 waiting", BACKUP.sub("~", line)) for line in lasting]
    # The daemon itself, not its files: what it offers to a login that has nothing.
    asked = ["ssh", "-o", "PreferredAuthentications=none", "-o", "ControlPath=none", host.ip]
    return [*lines, f"logins {lab.run(asked, check=False).stderr.splitlines()[-1]}"]


def _fleeting(line: str) -> bool:
    kind, _, rest = line.partition(" ")
    return bool(kind == "file" and ITS_OWN.search(rest.split(" ")[0])) or bool(
        kind == "unit" and FLEETING.search(rest)
    )


def differences(expected: list[str], found: list[str]) -> list[str]:
    """Return the lines that only one has: - before those that are missing, + before others."""
    missing, added = set(expected) - set(found), set(found) - set(expected)
    return sorted([f"- {line}" for line in missing] + [f"+ {line}" for line in added])
