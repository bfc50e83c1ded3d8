"""The tests, and what they share: `tests.launcher.sshd`, `python -m tests.soak`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
