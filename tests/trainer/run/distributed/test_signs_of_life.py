"""The thread that leaves a rank's signs of life."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.distributed_ranks import Ranks

HERE = "tests.trainer.run.distributed.test_signs_of_life"


def watch_for_a_moment(folder: str) -> list[str]:
    """Return the threads that are left by a watch whose store answers late."""
    import threading
    from pathlib import Path

    from torch._C._distributed_c10d import HashStore

    from trainer.run.distributed.rank_watchdog import RankWatch

    asked, answer = threading.Event(), threading.Event()

    class Late(HashStore):
        def clone(self) -> Late:
            return self

        def set(self, key: str, value: str) -> None:
            asked.set()
            answer.wait()
            super().set(key, value)

    with RankWatch(Late(), 0, ["host"], "cpu", Path(folder)).watch_ranks():
        assert asked.wait(60)
        threading.Timer(0.2, answer.set).start()
    return [thread.name for thread in threading.enumerate() if thread.name == "signs-of-life"]


def test_it_ends_before_the_interpreter_does(ranks: Ranks, tmp_path: Path) -> None:
    """One that returns from C++ later aborts the process, and torchrun repeats a complete run."""
    assert ranks.run(f"{HERE}:watch_for_a_moment", str(tmp_path), world=0) == [[]]
