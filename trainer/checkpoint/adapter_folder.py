"""An adapter's folder: where it is, and which base and tokenizer it has."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.reader import RUN_FILE, find_checkpoint
from trainer.model.formats import gguf_file
from trainer.model.hf_export import ADAPTER_CONFIG, TOKENIZER_FILE
from trainer.model.safetensors_headers import read_object
from trainer.system.errors import InputError


def find_adapter(path: Path) -> Path | None:
    """Return the folder of the adapter that an output folder, checkpoint or adapter holds.

    None for a full model.
    """
    if gguf_file(path) is not None:
        return None
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    if not any((path / name).is_file() for name in (ADAPTER_CONFIG, "config.json", RUN_FILE)):
        path = find_checkpoint(path)
    return path if (path / ADAPTER_CONFIG).is_file() else None


def find_tokenizer(base_dir: Path, adapter: str | Path | None) -> Path:
    """Return the folder of the tokenizer and templates that a model was trained with.

    It is the adapter's if that has one, else the base's.

    Args:
        adapter: an output folder, a checkpoint or an adapter; None: there is none. The folder may
            be missing: of `model.adapter` members that do not read its factors need none.
    """
    folder = find_adapter(Path(adapter)) if adapter and Path(adapter).is_dir() else None
    return folder if folder and (folder / TOKENIZER_FILE).is_file() else base_dir


def read_base_name(adapter: Path) -> str:
    """Return the base model that an adapter's folder names.

    Raises:
        InputError: it names none, or cannot be read.
    """
    where = adapter / ADAPTER_CONFIG
    named = read_object(where).get("base_model_name_or_path")
    if not isinstance(named, str):
        raise InputError(f"{where}: names no base model")
    return named
