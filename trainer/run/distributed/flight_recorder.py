"""torch's flight recorder: the last collectives of a process, and which of them never ended.

It is kept beside the run's metrics when a process has lost another one.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainer.system.errors import first_line

_FOLDER = "flight-recorder"
_COLLECTIVES = "2000"


def record_collectives(output: Path) -> Path:
    """Have torch record the collectives of process groups that are opened from now on.

    Returns:
        The folder for records, below a run's output: one JSON file a process. NCCL's watchdog
        writes there by itself.
    """
    folder = output / _FOLDER
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _COLLECTIVES)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/nccl-rank-")
    return folder


def save_record(path: Path) -> str:
    """Write what this process has recorded; return what an error line says of it."""
    from torch._C import _distributed_c10d

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_distributed_c10d._dump_fr_trace_json())  # pyright: ignore  # not in the stubs
    except (OSError, RuntimeError) as error:
        return f"; the last collectives could not be written: {first_line(error)}"
    return f"; its last collectives are in {path}"
