"""Several commands of `trainer` on two ranks of torchrun, which are forked (see `Ranks`).

Each meets the other rank as after a restart by torchrun, in a part of the store of its own.
"""

from __future__ import annotations

import contextlib
import io
import os

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.cli import trainer


def under_torchrun(commands: list[list[str]]) -> list[list[str]]:
    """Return what each rank prints on stdout and on stderr; an error of a rank is raised.

    With torchrun's agent, meeting point and variables, as of `torchrun --standalone`; its ranks
    are forks of this process, and not interpreters that import torch once more each.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="a test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    printed = elastic_launch(config, be_a_rank)(commands)
    return [printed[rank] for rank in sorted(printed)]


def be_a_rank(commands: list[list[str]]) -> list[str]:
    """Run the commands one after the other."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for number, words in enumerate(commands):
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
            trainer(words, standalone_mode=False)
    return [out.getvalue(), err.getvalue()]
