"""`trainer completion`: the script that teaches a shell commands and what they take."""

from __future__ import annotations

from trainer.commandline.completion import completion_of

completion = completion_of("trainer")
