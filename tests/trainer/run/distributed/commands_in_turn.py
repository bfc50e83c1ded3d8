"""Several commands of `trainer` as one rank of torchrun: torch is imported once for all.

    torchrun ... -m tests.trainer.run.distributed.commands_in_turn '[["generate", ...], ...]'

Each meets the other ranks as after a restart by torchrun, in a part of the store of its own.
"""

from __future__ import annotations

import json
import os
import sys

from trainer.cli import trainer


def main(commands: list[list[str]]) -> None:
    """Run them; an error ends this rank with a traceback."""
    for number, words in enumerate(commands):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        trainer(words, standalone_mode=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
