"""Folders and files that are not a model, and the command that converts them to one."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from trainer.system.errors import InputError
from trainer.system.regular_file import open_file, read_file

ADAPTER_CONFIG = "adapter_config.json"

_POINTER = b"version https://git-lfs"
_CONVERT = (
    "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s, d = sys.argv[1:3];"
    " [kind.from_pretrained(s).save_pretrained(d) for kind in (M, T)]"
)


def way_in(path: Path) -> str | None:
    """Return the kind of a folder or file and its conversion to a model; None if unknown."""
    if path.is_dir():
        return _folder(path)
    if path.suffix in (".bin", ".safetensors", ".pt", ".pth"):
        return f"is a file, a model is a folder: give {path.parent}"
    return None


def refuse_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer: the few lines that a clone without git-lfs has for a large file.

    Raises:
        InputError: it is one.
    """
    try:
        with open_file(path) as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return  # the reader says what is wrong
    if pointer:
        raise InputError(
            f"{path}: a Git LFS pointer, not the file itself; fetch it: git lfs install && git"
            f" -C {shlex.quote(str(path.parent))} lfs pull"
        )


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path means: itself, or the only model of a folder.

    None if it means none.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    # An output folder stands for its best checkpoint, whatever lies beside that.
    if not path.is_dir() or (path / "config.json").is_file() or (path / "checkpoints").is_dir():
        return None
    found = list(path.glob("*.gguf"))
    return found[0] if len(found) == 1 and not any(path.glob("*.safetensors")) else None


def lasting_name(model: str, folder: Path) -> str:
    """Return where a user finds a model again: its GGUF file, else the folder it resolved to.

    The folder of a GGUF file is in a cache, which is emptied.
    """
    return str((gguf_file(Path(model).expanduser()) or folder).resolve())


def _folder(folder: Path) -> str | None:
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapter(folder, folder)
    # An output folder of `trainer finetune` stands for its best checkpoint.
    if (folder / "checkpoints" / "best" / ADAPTER_CONFIG).is_file():
        return _adapter(folder, folder / "checkpoints" / "best")
    if any(folder.glob("*.safetensors")):
        return None
    if any(folder.glob("*.bin")):
        return (
            "has its weights as .bin (pickle), Motley reads safetensors; convert it: "
            + _command(folder, folder)
        )
    if found := sorted(folder.glob("*.gguf")):
        return f"has {len(found)} GGUF files: give one of them, such as {found[0]}"
    return None


def _adapter(folder: Path, adapter: Path) -> str:
    merged = shlex.quote(f"{folder.name}-merged")
    return (
        f"is a LoRA adapter of {_base(adapter)}, not a model; merge it: trainer merge"
        f" {shlex.quote(str(folder))} -o {merged}, then give {merged}"
    )


def _base(adapter: Path) -> str:
    try:
        base = json.loads(read_file(adapter / ADAPTER_CONFIG))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "some model"
    return str(base)


def _command(source: Path, beside: Path) -> str:
    code = shlex.quote(f"import sys; {_CONVERT}")
    target = beside.with_name(f"{beside.name}-safetensors")
    python = shlex.quote(sys.executable)
    words = (python, "-P", "-c", code, *map(shlex.quote, (str(source), str(target))))
    return " ".join(words)
