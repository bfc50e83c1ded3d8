"""`launch` for a soak: as many faults in an hour as in a year, and supervisors that forget faster.

A supervisor gives up after 20 failures in a row, and a failure is forgotten after ten healthy
minutes: here after ten healthy seconds. Everything else is `launch`.
"""

from __future__ import annotations

import sys

from launcher import cli
from launcher.runs import up

HEALTHY = 10.0
"""Seconds that a process has to live until its earlier failures are forgotten."""
JOIN_DEADLINE = 30.0
"""exchange.join_deadline of a soak."""

if __name__ == "__main__":
    assert up.HEALTHY_MARGIN > 0.0
    up.HEALTHY_MARGIN = HEALTHY - JOIN_DEADLINE
    sys.exit(cli.run(sys.argv[1:]))
