"""The output folder of a run, which is no model's."""

from __future__ import annotations

from pathlib import Path

from trainer.system.errors import InputError

FOLDER = "checkpoints"
"""May be a link: a run with `checkpoint.folder` makes it, and follows no other."""


def check_output(folder: Path) -> None:
    """Check that a run may write into a folder: it is neither the root nor a model's, and what it
    holds leads nowhere else, as a folder that was copied from another machine might.

    Raises:
        InputError: it may not.
    """
    if folder.resolve() == Path("/"):
        raise InputError(f"output {folder}: is the root of this machine's files; give a folder")
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).is_file():
            raise InputError(f"output {folder}: holds a model ({name}); give a folder of its own")
    links = (path for path in folder.glob("*") if path.is_symlink() and path.name != FOLDER)
    if link := min(links, default=None):
        raise InputError(f"{link}: is a link, and a run writes through none; remove it")
