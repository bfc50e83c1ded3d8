"""The output folder of a run, which is no model's."""

from __future__ import annotations

from pathlib import Path

from trainer.system.errors import InputError


def check_output(folder: Path) -> None:
    """Check that a run may write into a folder: it is neither the root nor a model's.

    Raises:
        InputError: it is.
    """
    if folder.resolve() == Path("/"):
        raise InputError(f"output {folder}: is the root of this machine's files; give a folder")
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).is_file():
            raise InputError(f"output {folder}: holds a model ({name}); give a folder of its own")
