"""What went wrong with a lab, in one line for the person who asked for it."""

from __future__ import annotations


class LabError(Exception):
    """A lab or one of its hosts cannot do what was asked: what, where, what to do."""
