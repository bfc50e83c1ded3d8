"""What the machine shows of itself: taken before a lab and after it, the two must be equal.

`python -m tests.testbed.picture` prints one as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tests.testbed.processes import command_line, everyone, run

RULES = (["iptables-save"], ["nft", "list", "ruleset"])


def picture() -> dict[str, list[str]]:
    """Return links, routes, firewall rules, mounts, namespaces, processes, cgroups, sysctls."""
    links = run(["ip", "-brief", "link"]).stdout.splitlines()
    rules: list[str] = []
    for command in RULES:
        if shutil.which(command[0]):
            shown = run(command, check=False).stdout.splitlines()
            rules += [line for line in shown if not line.startswith(("#", ":"))]
    forwarding = Path("/proc/sys/net/ipv4/ip_forward").read_text(encoding="utf-8")
    return {
        "links": sorted(line.split()[0] for line in links),
        "routes": run(["ip", "route", "show", "table", "all"]).stdout.splitlines(),
        "rules": rules,
        "mounts": Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines(),
        "namespaces": sorted(path.name for path in Path("/run/netns").glob("*")),
        "processes": sorted(" ".join(command_line(pid)) for pid in everyone()),
        "cgroups": sorted(map(str, Path("/sys/fs/cgroup").glob("**/motley-testbed-*"))),
        "loops": sorted(map(str, Path("/sys/block").glob("loop*/loop/backing_file"))),
        "settings": [forwarding, Path("/proc/sys/kernel/hostname").read_text(encoding="utf-8")],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(picture()) + "\n")
