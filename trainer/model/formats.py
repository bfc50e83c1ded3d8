"""Folders and files that are not a model, and the command or folder that is to be given."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from trainer.system.errors import InputError
from trainer.system.regular_file import open_file, read_file

ADAPTER_CONFIG = "adapter_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of the chat templates that are not the default."""

_POINTER = b"version https://git-lfs"
_CONVERT = (
    "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s, d = sys.argv[1:3];"
    " [kind.from_pretrained(s).save_pretrained(d) for kind in (M, T)]"
)
_CONVERT_ADAPTER = (
    "import sys, torch; from pathlib import Path as P; from safetensors.torch import save_file;"
    " f = P(sys.argv[1], 'adapter_model.bin'); t = torch.load(f, 'cpu', weights_only=True);"
    " save_file({n: v.clone().contiguous() for n, v in t.items()}, f.with_suffix('.safetensors'))"
)
_TRAINERS = re.compile(r"checkpoint-(\d+)")
"""A checkpoint of transformers' Trainer in its output folder."""


def template_files(folder: Path) -> dict[str, str]:
    """Return the files of a folder's chat templates by the templates' names, such as `tool_use`."""
    files = {"default": TEMPLATE_FILE}
    files |= {
        path.stem: f"{MORE_TEMPLATES}/{path.name}"
        for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    }
    return {name: file for name, file in files.items() if (folder / file).is_file()}


def find_conversion(path: Path) -> str | None:
    """Return the kind of a folder or file and its conversion to a model; None if unknown."""
    if path.is_dir():
        return _describe_folder(path)
    if path.suffix in (".bin", ".safetensors", ".pt", ".pth"):
        return f"is a file, a model is a folder: give {path.parent}"
    return None


def find_adapter_conversion(folder: Path) -> str | None:
    """Return why an adapter's weights are not read, and their conversion; None if unknown."""
    if not (folder / "adapter_model.bin").is_file():
        return None
    words = (sys.executable, "-P", "-c", _CONVERT_ADAPTER, str(folder))
    return (
        "has its weights as adapter_model.bin (pickle), Motley reads safetensors; convert it: "
        + shlex.join(words)
    )


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


def _describe_folder(folder: Path) -> str | None:
    if (folder / ADAPTER_CONFIG).is_file():
        return _describe_adapter(folder, folder)
    # An output folder of `trainer finetune` stands for its best checkpoint.
    if (folder / "checkpoints" / "best" / ADAPTER_CONFIG).is_file():
        return _describe_adapter(folder, folder / "checkpoints" / "best")
    if any(folder.glob("*.safetensors")):
        return None
    if any(folder.glob("*.bin")):
        return (
            "has its weights as .bin (pickle), Motley reads safetensors; convert it: "
            + _conversion_command(folder, folder)
        )
    if (folder / "zero_to_fp32.py").is_file():
        joined = shlex.quote(f"{folder}-safetensors")
        script, found = shlex.quote(str(folder / "zero_to_fp32.py")), shlex.quote(str(folder))
        return (
            "has its weights as DeepSpeed's parts; join them, and put config.json and the"
            f" tokenizer beside them: python {script} {found} {joined} --safe_serialization"
        )
    if parts := sorted(folder.glob("pytorch_model_fsdp_*/")):
        joined = shlex.join((str(parts[0]), f"{folder}-safetensors"))
        return (
            "has its weights as FSDP's parts; join them, and put config.json and the tokenizer"
            f" beside them: accelerate merge-weights {joined}"
        )
    if steps := [(int(n[1]), at) for at in folder.iterdir() if (n := _TRAINERS.fullmatch(at.name))]:
        return (
            f"has checkpoints of transformers' Trainer: give one of them, such as {max(steps)[1]}"
        )
    if found := sorted(folder.glob("*.gguf")):
        return f"has {len(found)} GGUF files: give one of them, such as {found[0]}"
    return None


def _describe_adapter(folder: Path, adapter: Path) -> str:
    merged = shlex.quote(f"{folder.name}-merged")
    return (
        f"is a LoRA adapter of {_describe_base(adapter)}, not a model; merge it: trainer merge"
        f" {shlex.quote(str(folder))} -o {merged}, then give {merged}"
    )


def _describe_base(adapter: Path) -> str:
    try:
        base = json.loads(read_file(adapter / ADAPTER_CONFIG))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "some model"
    return str(base)


def _conversion_command(source: Path, beside: Path) -> str:
    code = shlex.quote(f"import sys; {_CONVERT}")
    target = beside.with_name(f"{beside.name}-safetensors")
    python = shlex.quote(sys.executable)
    words = (python, "-P", "-c", code, *map(shlex.quote, (str(source), str(target))))
    return " ".join(words)
