"""The proof that all workers hold the same weights (F-DP-001). Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from trainer.errors import ProtocolError

Verdict = Literal["pending", "verified", "diverged"]


class Audit:
    """Compares the workers' digests after one step with ours; the newest step counts."""

    def __init__(self) -> None:
        self.step = -1
        self.digest = ""
        self._confirmed: set[int] = set()
        self._verified = True

    def expect(self, step: int, digest: str) -> None:
        """Ask for the digest of the weights after `step`."""
        self.step, self.digest = step, digest
        self._confirmed = set()
        self._verified = False

    @property
    def confirmed(self) -> list[int]:
        """The ranks that proved our weights."""
        return sorted(self._confirmed)

    @property
    def pending(self) -> bool:
        """Whether proofs are still out."""
        return not self._verified

    def compare(self, rank: int, step: int, digest: str, ready: Collection[int]) -> Verdict:
        """Take a report; "verified" comes once, with the last of the `ready` ranks.

        Raises:
            ProtocolError: nobody asked for it.
        """
        if step > self.step:
            raise ProtocolError(f"a report on step {step}, which was not asked for")
        if step < self.step:
            return "pending"  # from a worker that fell behind: the newer step says more
        if digest != self.digest:
            return "diverged"
        self._confirmed.add(rank)
        return "verified" if self.settled(ready) else "pending"

    def settled(self, ready: Collection[int]) -> bool:
        """Return whether the proofs are complete now; True once a step."""
        if self._verified or not self._confirmed or not self._confirmed.issuperset(ready):
            return False
        self._verified = True
        return True
