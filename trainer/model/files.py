"""A model's folder on this machine, and its digest to compare machines."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from trainer.model.formats import gguf_file, way_in
from trainer.model.safetensors_headers import read_headers
from trainer.system.errors import InputError
from trainer.system.process.announcement import announced

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")
_DIGESTED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def resolve_model(name: str) -> Path:
    """Return a model's folder: a local one, a GGUF file's, or of a hub name (`Qwen/Qwen3-0.6B`).

    A hub model is downloaded into the Hugging Face cache unless it is there. A GGUF file, or a
    folder with one and no other weights, is converted into Motley's cache.

    Raises:
        InputError: there is no such folder, or the hub does not serve the model.
    """
    local = Path(name).expanduser()
    if (gguf := gguf_file(local)) is not None:
        from trainer.model.gguf.conversion import converted

        return converted(gguf.resolve())
    if local.is_dir():
        return local.resolve()
    if local.exists():
        other = way_in(local) or "is a file, a model is a folder with config.json"
        raise InputError(f"{name}: {other}")
    owner, _, model = name.partition("/")
    if name.startswith((".", "/", "~")) or not owner or not model or "/" in model:
        raise InputError(f"{name}: no such model folder")
    return _from_hub(name)


def model_digest(model_dir: Path) -> str:
    """Return the BLAKE3 hex digest of a model folder: config, weights and tokenizer.

    It includes the tokenizer: another one makes other samples of the same data.

    Raises:
        InputError: a file is missing or cannot be read.
    """
    files = {model_dir / name for name in _DIGESTED if (model_dir / name).is_file()}
    files |= {header.file for header in read_headers(model_dir).values()}
    hasher = blake3(max_threads=blake3.AUTO)
    with announced(f"hashing {model_dir}"):
        for path in sorted(files, key=lambda path: path.name):
            try:
                # Framed by name and size, so that bytes cannot move from one file to the next.
                hasher.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                hasher.update_mmap(path)
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return hasher.hexdigest()


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    except ImportError:
        raise InputError(
            f"{name}: no such model folder, and this machine has no huggingface_hub to download it"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), etag_timeout=5.0))
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(f"{name}: no such model folder, and the hub has no such model") from None
    except Exception as error:  # the hub's client raises dozens of kinds for "cannot reach it"
        reason = type(error).__name__
        raise InputError(
            f"{name}: no such model folder, and the hub cannot be reached ({reason}); download the"
            " model first or give a local folder"
        ) from None
