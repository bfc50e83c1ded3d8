"""Describes one folder of logits in several processes at the same moment.

    python -m tests.trainer.describe_at_once FOLDER SEED...

Prints for each, in the order in which they end, the seed that is agreed on, or why it was refused.
"""

import json
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from tests.trainer.tiny_logits import SCHEMES, tiny_description
from trainer.distill.logits.dataset import LogitsFolder
from trainer.system.errors import RefusedError

TOPK = tiny_description(SCHEMES["topk"])


def describe(path: Path, seed: int, barrier, results) -> None:
    barrier.wait()
    try:
        results.put(LogitsFolder(path).write_description(replace(TOPK, seed=seed)).seed)
    except RefusedError as error:
        results.put(str(error))


def main(path: Path, seeds: list[int]) -> None:
    context = get_context("fork")
    barrier, results = context.Barrier(len(seeds)), context.SimpleQueue()
    processes = [
        context.Process(target=describe, args=(path, seed, barrier, results)) for seed in seeds
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(seeds)
    print(json.dumps([results.get() for _ in seeds]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
