"""Faults without pause against one run of real processes, and what is left of it afterwards.

`python -m tests.soak --minutes 60 --seed 7`, or `make soak`; docs/testing.md says how to read it.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
for _shared in ("cluster", "trainer"):  # the proxy, the processes, the small model
    sys.path.append(str(_TESTS / _shared))
