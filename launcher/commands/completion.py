"""`launch completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

from trainer.system.commandline.completion import completion_of

completion = completion_of("launch")
