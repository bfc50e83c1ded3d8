"""Which units run with settings that are older than their files.

What a play remembers (`notify`, `is changed`) is lost when it is interrupted; this asks the host.
"""

import calendar
import os
import time

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: motley_unread_settings
short_description: Names the active units that were started before their settings were written
description: Changes nothing. A unit that is not active reads its files when it starts.
options:
  units:
    description: By unit, the paths that it reads; of a folder, what was made or removed there.
    type: dict
    required: true
  reload_reads:
    description: Whether a reload reads them too.
    type: bool
    default: false
"""

RETURN = """
units:
  description: Those units, in the order given.
  type: list
  returned: always
"""


def newer(mtime, wall, monotonic, now):
    """Whether a file is newer than an event, by either clock.

    `mtime` and `wall` are seconds of the wall clock, `wall` in whole ones; `monotonic` is seconds
    since boot. `now` is (wall, monotonic). The wall clock may have been set since the event, and
    the other one stands still while the machine is suspended.
    """
    return int(mtime) > wall or mtime > now[0] - (now[1] - monotonic)


def modified(paths):
    """Return the latest modification time of the paths that exist, 0.0 if none does."""
    return max((os.lstat(path).st_mtime for path in paths if os.path.lexists(path)), default=0.0)


def main():
    """Ask systemd about each unit."""
    options = {
        "units": {"type": "dict", "required": True},
        "reload_reads": {"type": "bool", "default": False},
    }
    module = AnsibleModule(options, supports_check_mode=True)
    stamp = "StateChangeTimestamp" if module.params["reload_reads"] else "ActiveEnterTimestamp"
    names = ["ActiveState", stamp, f"{stamp}Monotonic"]
    unread = []
    for unit, paths in module.params["units"].items():
        command = ["systemctl", "show", "--property", ",".join(names), unit]
        _, shown, _ = module.run_command(command, check_rc=True, environ_update={"TZ": "UTC"})
        state, wall, monotonic = (
            dict(line.split("=", 1) for line in shown.splitlines()).get(name, "") for name in names
        )
        if state not in ("active", "reloading") or not wall:
            continue
        since = calendar.timegm(time.strptime(wall, "%a %Y-%m-%d %H:%M:%S UTC"))
        now = time.time(), time.clock_gettime(time.CLOCK_MONOTONIC)
        if newer(modified(paths), since, int(monotonic) / 1e6, now):
            unread.append(unit)
    module.exit_json(changed=False, units=unread)


if __name__ == "__main__":
    main()
