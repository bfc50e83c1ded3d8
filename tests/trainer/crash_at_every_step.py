"""Saves a checkpoint again and again, and dies one disk operation later each time.

    python -m tests.trainer.crash_at_every_step FOLDER

Each child process is killed (SIGKILL) before its k-th operation of one save; the parent then opens
the folder as a restarted coordinator would. Prints one JSON object a line.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from tests.trainer.tiny_run import tiny_config, tiny_layout, tiny_progress, tiny_state
from trainer.checkpoint.store import CheckpointStore
from trainer.system.storage.atomic_folder import Disk

OPERATIONS = ("make_folder", "create", "write", "sync", "close", "rename", "link", "remove_tree")


class CountingDisk(Disk):
    """Calls `before(k, operation, arguments)` ahead of the k-th operation."""

    def __init__(self, before=lambda *_: None) -> None:
        self.count_anew(before)
        for name in OPERATIONS:
            setattr(self, name, self._wrap(name, getattr(self, name)))

    def count_anew(self, before) -> None:
        """Count from 1 with the next operation, and call another function."""
        self.count = 0
        self.before = before

    def _wrap(self, name, operation):
        def counted(*arguments):
            self.count += 1
            self.before(self.count, name, arguments)
            return operation(*arguments)

        return counted


def open_store(folder: Path, disk: Disk | None = None, keep_last: int = 1) -> CheckpointStore:
    return CheckpointStore(
        folder, tiny_layout(), tiny_config(keep_last=keep_last), Path("base"), disk=disk
    )


def save(store: CheckpointStore, step: int, generation: int = 3) -> None:
    progress = replace(tiny_progress(step), generation=generation)
    store.save(tiny_state(step).take_snapshot(), progress, metric=float(step))


def prepare(folder: Path, again: bool) -> None:
    """One checkpoint: of the step before, or of the very step that is written once more."""
    shutil.rmtree(folder, ignore_errors=True)
    save(open_store(folder), step=2 if again else 1, generation=2)


def main(root: Path) -> None:
    for again in (False, True):
        k = 0
        while True:
            k += 1
            folder = root / f"{again:d}-{k}"
            prepare(folder, again)
            child = os.fork()
            if child == 0:

                def die(count: int, name: str, arguments: tuple, at: int = k) -> None:
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)

                disk = CountingDisk()
                store = open_store(folder, disk)
                disk.count_anew(die)
                save(store, 2)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            report(folder, k, again, os.waitstatus_to_exitcode(status))
            if status == 0:
                break


def report(folder: Path, k: int, again: bool, exit_code: int) -> None:
    store = open_store(folder)
    restored = store.restore()
    best = store.best_checkpoint()
    result = {
        "k": k,
        "again": again,
        "exit_code": exit_code,
        "step": restored.progress.step if restored else None,
        "intact": restored is not None
        and restored.state.compute_digest() == tiny_state(restored.progress.step).compute_digest(),
        "best": best.name if best else None,
        "hidden": [path.name for path in folder.iterdir() if path.name.startswith(".")],
    }
    save(store, 3)
    newest = store.restore()
    result["next"] = newest.progress.step if newest else None
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
