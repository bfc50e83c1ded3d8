"""The child of `run_for_start`: SCRIPT DIGEST SEED FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.config.script import read_script
from trainer.replica.script.opened import open_script
from trainer.replica.script.start import write_start
from trainer.system.errors import TrainerError

if __name__ == "__main__":
    path, digest, seed, folder = sys.argv[1:]
    try:
        opened = open_script(read_script(Path(path), digest), int(seed))
        write_start(opened.start, Path(folder))
    except TrainerError as error:
        sys.exit(str(error))  # to stderr
