"""Being stopped in the middle of a computation of minutes."""

from __future__ import annotations


class Stopped(BaseException):
    """Somebody asked to stop: no error, so nothing that catches errors may hold it up."""


class Interruption:
    """Ends what the main thread does by `Stopped`.

    A forward ends between two of its operations. What must be finished, such as writing a shard,
    belongs into another thread.
    """

    def __init__(self) -> None:
        self._reason = ""

    def ask(self, reason: str) -> None:
        """End here and now; of a signal handler in the main thread."""
        if not self._reason:  # a second signal must not disturb the way out
            self._reason = reason
            raise Stopped(reason)

    def check(self) -> None:
        """Raise `Stopped` if it was asked for where exceptions are lost, as in a finaliser."""
        if self._reason:
            raise Stopped(self._reason)
