"""`launch completion`: print the completion script of a shell."""

from __future__ import annotations

from trainer.system.commandline.completion import completion_of

completion = completion_of("launch")
