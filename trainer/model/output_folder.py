"""The output folder of a run, which is no model's."""

from __future__ import annotations

from collections.abc import Iterable
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
            raise InputError(f"output {folder}: contains a model ({name}); give another folder")
    refuse_links(path for path in folder.glob("*") if path.name != FOLDER)


def refuse_links(paths: Iterable[Path]) -> None:
    """Refuse links where a process writes.

    Raises:
        InputError: one of the paths is a link.
    """
    if link := min((path for path in paths if path.is_symlink()), default=None):
        raise InputError(f"{link}: is a link, and nothing is written through one; remove it")
