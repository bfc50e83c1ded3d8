"""run.yaml: the complete settings of a run, beside its results; `--config` takes it."""

from __future__ import annotations

from pathlib import Path

from trainer.config.run import RunConfig
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_file import replace_file

RUN_FILE = "run.yaml"
_MARK = "# The settings of a run, as Motley wrote them"


def write_run_file(config: RunConfig, run_id: str) -> None:
    """Write the settings into the run's output folder; a file that Motley did not write is kept.

    A `checkpoint.folder` named after the run is left out, as it serves this run alone: the launcher
    gives each run such a folder on a share, and so the next run from this file too.

    Raises:
        StorageError: the disk failed.
    """
    folder = Path(config.output)
    path = folder / RUN_FILE
    model_on_hub = not Path(config.model.path).expanduser().is_dir()
    whole = config.anchor_paths(Path.cwd(), model_on_hub=model_on_hub)
    checkpoint = whole.checkpoint
    if Path(checkpoint.folder or "").name == run_id != config.name:  # the name is its default
        checkpoint = checkpoint.model_copy(update={"folder": None})
        whole = whole.model_copy(update={"checkpoint": checkpoint})
    text = f"{_MARK} when {run_id} began; every one: docs/config.md\n{whole.to_yaml()}"
    try:
        if path.exists() and not path.read_bytes().startswith(_MARK.encode()):
            return
        replace_file(path, text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None
