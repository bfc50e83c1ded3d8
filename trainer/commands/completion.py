"""`trainer completion`: print a shell's completion script."""

from __future__ import annotations

from trainer.system.commandline.completion import completion_of

completion = completion_of("trainer")
