"""Claims: exactly one runner scores a checkpoint, also on a share, and also if runners die.

The history of a checkpoint is a chain of small files, `<digest>.0`, `<digest>.1` and so on, of
which the last one is valid. A change creates the next file, whole, and exactly one process
succeeds, over NFS too (`create_atomically`). Taking over from a dead runner, releasing and
delivering a result all compete for that name, so a runner that resumes after a stall finds it taken
and its result is discarded. Nothing is ever renamed or removed, and a full disk leaves nothing.

A living runner appends a newline to its file now and then. Others judge by that change and by
their own clock, never by another host's time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.system.process.sign_of_life import Silence, give_signs
from trainer.system.received import receive_json
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import create_atomically
from trainer.system.storage.jsonl import json_text

SCHEMA = "motley.claim/1"

State = Literal["held", "released", "done"]


@dataclass(frozen=True)
class ChainEnd:
    """The last file of a chain."""

    generation: int
    state: State
    size: int
    """Bytes; a held one grows while its runner lives."""
    record: dict[str, Any] | None = None
    """The result, if done."""


class Claims:
    """The claims in one folder, as one runner sees them.

    Args:
        timeout: seconds without a sign of life after which a claim may be taken over.
    """

    def __init__(
        self,
        folder: Path,
        runner: str,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._runner, self._timeout, self._clock = folder, runner, timeout, clock
        self._heads: dict[str, ChainEnd] = {}
        self._silences: dict[str, Silence] = {}

    def look(self) -> dict[str, ChainEnd]:
        """Return the state of each checkpoint, by its digest.

        Call it several times within the timeout: silence counts only between calls, so an
        unreachable share or a suspended process does not make a live runner look dead.

        Raises:
            OSError: the folder cannot be read.
        """
        silences, self._silences = self._silences, {}  # an unreadable folder shows none
        self._heads = {
            digest: self._head(digest, generation)
            for digest, generation in self._generations().items()
        }
        for digest, head in self._heads.items():
            silence = silences.get(digest) or Silence(self._clock, longest=self._timeout / 2)
            silence.hear(head)
            self._silences[digest] = silence
        return self._heads

    def take(self, digest: str) -> Claim | None:
        """Return a claim that only this runner holds; None if it is not available.

        By the last `look`.

        Raises:
            OSError: it cannot be written.
        """
        head = self._heads.get(digest)
        if head is not None and not self._may_go_on(digest, head):
            return None
        for folder in (self._folder.parent, self._folder):
            with suppress(FileExistsError):
                folder.mkdir()  # without its parents: the share may be unreachable
        generation = head.generation + 1 if head else 0
        claim = Claim(self._folder, digest, generation, self._runner, self._timeout / 6)
        return claim if claim.begin() else None

    def _may_go_on(self, digest: str, head: ChainEnd) -> bool:
        if head.state == "held":
            silence = self._silences.get(digest)
            return silence is not None and silence.seconds >= self._timeout
        return head.state == "released"

    def _generations(self) -> dict[str, int]:
        """Return the last generation of each digest."""
        last: dict[str, int] = {}
        with suppress(FileNotFoundError):  # nothing has been claimed yet
            for path in self._folder.iterdir():
                digest, _, number = path.name.partition(".")
                if number.isdecimal():
                    last[digest] = max(last.get(digest, 0), int(number))
        return last

    def _head(self, digest: str, generation: int) -> ChainEnd:
        known = self._heads.get(digest)
        if known and known.state == "done":
            return known
        data = read_file(self._folder / f"{digest}.{generation}")
        state, record = "held", None
        # One that is being written, or was left half-written, counts as held.
        with suppress(ValueError, KeyError, TypeError):
            tree = receive_json(dict[str, Any], data, "claim", lines=True)
            if tree["schema"] == SCHEMA and tree["state"] in ("released", "done"):
                state, record = tree["state"], tree["record"]
        return ChainEnd(generation, state, len(data), record)


class Claim:
    """One runner's claim."""

    def __init__(
        self, folder: Path, digest: str, generation: int, runner: str, interval: float
    ) -> None:
        self._path = folder / f"{digest}.{generation}"
        self._next = folder / f"{digest}.{generation + 1}"
        self._runner, self._interval = runner, interval

    def keep(self) -> Callable[[], None]:
        """Show signs of life until the returned function is called."""
        return give_signs(self._show_life, self._interval).set

    def begin(self) -> bool:
        """Create the claim; False if another runner has.

        Raises:
            OSError: the folder is unreachable, or the disk is full.
        """
        return self._create(self._path, "held")

    def deliver(self, record: dict[str, Any]) -> bool:
        """Replace the claim by a result; False if another runner has taken it over.

        Raises:
            OSError: the folder is unreachable, or the disk is full; may be tried again.
        """
        return self._create(self._next, "done", record)

    def release(self) -> None:
        """Release it, so that others can take it at once."""
        with suppress(OSError):  # then it expires
            self._create(self._next, "released")

    def _create(self, path: Path, state: State, record: dict[str, Any] | None = None) -> bool:
        tree = {"schema": SCHEMA, "state": state, "runner": self._runner, "record": record}
        return create_atomically(path, json_text(tree).encode() + b"\n")

    def _show_life(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)
