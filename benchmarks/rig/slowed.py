"""`trainer`, but each sample also costs time: `python -m rig.slowed SECONDS finetune ...`.

The processes of a replica group are forked from this one, and so cost the same.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from trainer.cli import trainer
from trainer.replica.torch.replica import TorchReplica


def main(seconds: float, words: list[str]) -> None:
    """Run a command."""
    compute = TorchReplica.forward_backward

    def slowed(replica: TorchReplica, batch: Any, *rest: Any) -> Any:
        cost = seconds * len(batch)
        time.sleep(cost)
        result = compute(replica, batch, *rest)
        return replace(result, seconds=result.seconds + cost)  # shares follow what it reports

    TorchReplica.forward_backward = slowed  # pyright: ignore[reportAttributeAccessIssue]
    trainer(words)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
