"""How often the host waits for a device, by the function of the trainer that makes it wait."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from tests import ROOT


class Waits(Counter[str]):
    """Waits, counted by the innermost function of the trainer; without one: `elsewhere`."""

    def note(self, *, once: bool = False) -> None:
        """Count a wait; `once`: whether further ones of that function are the same one."""
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(f"{ROOT}/trainer/"):
            frame = frame.f_back
        name = "elsewhere" if frame is None else frame.f_code.co_qualname
        name = name.split(".<locals>")[0]
        self[name] = 1 if once else self[name] + 1
