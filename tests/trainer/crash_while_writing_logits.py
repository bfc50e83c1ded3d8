"""Describes a folder of logits and writes a shard, and dies one disk operation later each time.

    python -m tests.trainer.crash_while_writing_logits FOLDER

Each child process is killed (SIGKILL) before its k-th operation; the parent then does what a
teacher does that is started again. Prints one JSON object a line.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.trainer.crash_at_every_step import CountingDisk
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_windows
from trainer.distill.logits.dataset import LogitsFolder
from trainer.system.storage.atomic_folder import Disk

DESCRIPTION = tiny_description(SCHEMES["topk"])


def work(folder: Path, disk: Disk, damage: bool) -> None:
    logits = LogitsFolder(folder)
    logits.write_description(DESCRIPTION, disk)
    if damage:  # as found on the disk: the shard is there, and cut
        logits.write_shard(1, tiny_windows(DESCRIPTION, 1))
        os.truncate(logits.shard_path(1) / "logits.parquet", 100)
    logits.write_shard(1, tiny_windows(DESCRIPTION, 1), disk)


def main(root: Path) -> None:
    for damage in (False, True):
        k = exit_code = 1
        while exit_code:
            folder = root / f"{damage:d}-{k}"
            child = os.fork()
            if child == 0:

                def die(count: int, name: str, arguments: tuple, at: int = k) -> None:
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)

                work(folder, CountingDisk(die), damage)
                os._exit(0)
            exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            report(folder, k, damage, exit_code)
            k += 1


def report(folder: Path, k: int, damage: bool, exit_code: int) -> None:
    logits = LogitsFolder(folder)
    described = (folder / "dataset.json").exists()
    logits.write_description(DESCRIPTION)
    there = logits.has_shard(1)
    result = {
        "k": k,
        "damage": damage,
        "exit_code": exit_code,
        "described": described,
        "there": there,
        "windows": len(logits.read_shard(1)) if logits.is_complete(1) else None,
    }
    logits.write_shard(1, tiny_windows(DESCRIPTION, 1))
    logits.verify_shard(1)
    result["missing"] = logits.list_missing()
    result["requests"] = logits.list_requests()
    result["hidden"] = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
