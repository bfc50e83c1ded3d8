"""Detect which ranks are alive, which a failed or hanging collective cannot tell.

Every rank leaves a sign of life in the rendezvous' store while its process runs. After an error the
others read there which rank failed and why, and which is silent (killed, stopped, or cut off).
The last collectives of this rank are kept, see `flight_recorder`.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainer.run.distributed import flight_recorder
from trainer.run.distributed.rank_notes import read_note
from trainer.system.errors import (
    DoesNotFitError,
    InputError,
    TrainerError,
    UnreachableError,
    first_line,
    is_out_of_memory,
    should_restart,
)
from trainer.system.process.native_thread import NativeThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_INTERVAL = 0.5
_SILENT = 5.0
"""Seconds without a sign of life after which a rank is silent: ten intervals."""
_LOOKS = 10
"""Looks at the signs of life before a rank is silent: on a busy host they take longer."""
_ANSWERS = 15.0
"""Seconds for the store to answer once."""
_KNOWS = 60.0
"""Seconds to find out which ranks are silent."""
_STAYS = 30.0
"""Seconds that rank 0 stays for the others to read why it ends."""
_LOST = "lost others: "
"""The beginning of a reason that is no cause of one's own."""
_GONE = UnreachableError.exit_code
_OF_PEERS = ("gloo", "Connection closed by peer", "Connection reset", "Timed out waiting", "NCCL")
Reason = tuple[str, Annotated[int, Field(ge=1, le=255)]]
"""Why a rank ends, and its exit code."""


class RankWatch:
    """This rank's signs of life, and its view of the others.

    Args:
        hosts: by rank.
        device: for messages.
        output: the run's folder.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Sequence[str], device: str, output: Path
    ) -> None:
        self._store, self._rank, self._hosts = _clone_connection(store), rank, hosts
        self._device, self._output = device, output
        self._ended = threading.Event()
        self._reported = False
        self._silent: set[int] = set()
        self._of_rank_0: list[tuple[str, int]] = []
        """Why rank 0 ends, which may take the store with it, and the exit code."""

    @contextmanager
    def watch_ranks(self) -> Iterator[None]:
        """Leave signs of life during the block, and explain its errors as `explain_errors` does.

        Open it before the process group, whose collectives are then recorded.
        """
        flight_recorder.record_collectives(self._output)
        signs = NativeThread(self._send_heartbeats, "signs-of-life")
        signs.start()
        try:
            with self.explain_errors():
                yield
        finally:
            if self._reported and self._rank == 0:
                self._wait_for_readers()
            self._ended.set()
            signs.join(_SILENT)  # else `leave` ends the process beside it

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn errors of collectives and of memory into one line, and tell the others of any.

        Raises:
            UnreachableError: a collective failed; names the ranks that are the cause. Its exit
                code is theirs if another attempt cannot succeed.
            InputError: this rank's device has not enough memory.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
                raise self._out_of_memory() from None
            if is_peer_failure(error):
                raise self._explain_failure(error) from None
            if isinstance(error, TrainerError):
                self._report_failure(str(error), error.exit_code)
            else:
                self._report_failure(f"{type(error).__name__}: {first_line(error)}")
            raise

    def name_rank(self, rank: int) -> str:
        """Return `rank N on HOST`."""
        return f"rank {rank} on {self._hosts[rank]}"

    def _send_heartbeats(self) -> None:
        store, count = _clone_connection(self._store), 0
        with suppress(Exception):  # without a store the main thread fails, and says so
            while not self._ended.wait(_INTERVAL if count else 0):
                count += 1
                store.set(f"alive/{self._rank}", str(count))
                if self._rank and not self._of_rank_0 and store.check(["failed/0"]):
                    why, code = read_note(Reason, store.get("failed/0"), "failed/0")
                    lost = why.startswith(_LOST)
                    cause = (
                        why.removeprefix(_LOST)
                        if lost
                        else f"{self.name_rank(0)} has failed: {why}"
                    )
                    self._of_rank_0 = [(cause, code)]
                    store.set(f"heard/{self._rank}", "")

    def _report_failure(self, reason: str, code: int = TrainerError.exit_code) -> None:
        """Leave for the others why this rank ends, and its exit code; the first reason counts."""
        if self._reported:
            return
        self._reported = True
        note = json.dumps([reason, code])
        _ask_in_time(lambda: self._store.set(f"failed/{self._rank}", note), _ANSWERS)

    def _wait_for_readers(self) -> None:
        """Stay until the living ranks know why this one ends, for the store may end with it.

        They have heard of it, or have told of their own end. Those whose collective waits for this
        one find out when it leaves.
        """
        living = set(range(1, len(self._hosts))) - self._silent
        deadline = time.monotonic() + _STAYS
        with suppress(Exception):  # another process holds it, and has ended
            while living and time.monotonic() < deadline:
                keys = {rank: (f"failed/{rank}", f"heard/{rank}") for rank in living}
                living = {r for r in living if not any(self._store.check([k]) for k in keys[r])}
                time.sleep(_INTERVAL)

    def _out_of_memory(self) -> InputError:
        reason = f"{self._device} is out of memory"
        self._report_failure(reason, InputError.exit_code)
        return InputError(
            f"{self.name_rank(self._rank)}: {reason}; lower training.micro_batch_size or"
            " data.max_seq_len, or shard the model: parallel.data=fsdp and more processes"
        )

    def _explain_failure(self, error: Exception) -> UnreachableError:
        """Return the cause of a collective's failure."""
        folder = flight_recorder.record_collectives(self._output)
        record = flight_recorder.save_record(folder / f"rank-{self._rank}.json")
        found: list[tuple[str, int]] = []
        answers = _ask_in_time(lambda: self._read_key(f"alive/{self._rank}"), _ANSWERS)
        if not answers or not _ask_in_time(lambda: found.extend(self._find_causes()), _KNOWS):
            silence = f"{self.name_rank(0)}, which serves the store, does not answer"
            found = self._of_rank_0 or [(silence, _GONE)]
        what = "timed out" if "imed out" in str(error) else "failed"
        causes = "; ".join(why for why, _ in found) or f"all ranks are alive: {first_line(error)}"
        # Else whatever starts this rank again would have it wait for one that has ended for good.
        code = next((code for _, code in found if not should_restart(code)), _GONE)
        self._report_failure(f"{_LOST}{causes}", code)
        lost = UnreachableError(
            f"{self.name_rank(self._rank)}: a collective {what}: {causes}. Look at the log there"
            f" and start the job again: it resumes from its newest checkpoint{record}"
        )
        lost.exit_code = code
        return lost

    def _find_causes(self) -> list[tuple[str, int]]:
        """Return why other ranks failed, with exit codes, or else which are silent."""
        others = [rank for rank in range(len(self._hosts)) if rank != self._rank]
        heartbeats = {rank: self._read_key(f"alive/{rank}") for rank in others}
        silent, deadline = set(others), time.monotonic() + _SILENT
        for look in itertools.count(1):
            failures = {rank: self._read_key(f"failed/{rank}") for rank in others}
            reasons = {
                rank: read_note(Reason, note, self.name_rank(rank))
                for rank, note in failures.items()
                if note
            }
            if first := {
                rank: why for rank, why in reasons.items() if not why[0].startswith(_LOST)
            }:
                return [
                    (f"{self.name_rank(rank)} has failed: {why}", code)
                    for rank, (why, code) in first.items()
                ]
            silent -= reasons.keys()
            silent -= {
                rank for rank in silent if self._read_key(f"alive/{rank}") != heartbeats[rank]
            }
            if not silent or (look >= _LOOKS and time.monotonic() > deadline):
                break
            time.sleep(_INTERVAL)
        self._silent = silent
        return [
            (f"no heartbeat from {self.name_rank(rank)} (killed, stopped or cut off)", _GONE)
            for rank in sorted(silent)
        ]

    def _read_key(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""


def is_peer_failure(error: Exception) -> bool:
    """Whether a collective failed since another rank is gone or late."""
    from torch.distributed import DistError

    return isinstance(error, RuntimeError) and (
        isinstance(error, DistError) or any(sign in str(error) for sign in _OF_PEERS)
    )


def _clone_connection(store: Store) -> Store:
    """Return a connection of its own: a wait on it holds up all that share it."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs


def _ask_in_time(action: Callable[[], object], patience: float) -> bool:
    """Return whether something that asks the store was done: it may be held by a stopped rank."""
    ended, done = threading.Event(), threading.Event()

    def act() -> None:
        with suppress(Exception):
            action()
            done.set()
        ended.set()

    NativeThread(act, "store").start()
    ended.wait(patience)
    return done.is_set()
