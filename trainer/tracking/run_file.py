"""run.yaml: the settings of a run, complete, beside its results; `--config` takes it."""

from __future__ import annotations

from pathlib import Path

from trainer.config.run import RunConfig
from trainer.errors import StorageError
from trainer.storage.jsonl import replace_file

RUN_FILE = "run.yaml"
_MARK = "# The settings of a run, as Motley wrote them"


def write_run_file(config: RunConfig, run_id: str) -> None:
    """Write the settings into the run's output folder; a file that Motley did not write is kept.

    Raises:
        StorageError: the disk failed.
    """
    folder = Path(config.output)
    path = folder / RUN_FILE
    model_on_hub = not Path(config.model.path).expanduser().is_dir()
    whole = config.anchored(Path.cwd(), model_on_hub=model_on_hub)
    text = f"{_MARK} when {run_id} began; every one: docs/config.md\n{whole.to_yaml()}"
    try:
        if path.exists() and not path.read_bytes().startswith(_MARK.encode()):
            return
        replace_file(path, text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None
