"""A model's folder on this machine, and its digest to compare machines."""

from __future__ import annotations

import mmap
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

from trainer.model.formats import find_conversion, gguf_file, template_files
from trainer.model.safetensors_headers import TensorHeader, read_headers
from trainer.system.errors import InputError, convert_read_errors
from trainer.system.process.slow_log import log_if_slow
from trainer.system.regular_file import open_file, read_file
from trainer.system.storage.progress import report_progress

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")
_DIGESTED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def resolve_model(name: str) -> Path:
    """Return a model's folder: a local one, a GGUF file's, or of a hub name (`Qwen/Qwen3-0.6B`).

    A hub model is downloaded into the Hugging Face cache unless it is there. A GGUF file, or a
    folder with one and no other weights, is converted into Motley's cache.

    Raises:
        InputError: there is no such folder, or the hub does not serve the model.
    """
    local = Path(name).expanduser()
    if (folder := local_model(local)) is not None:
        return folder
    if local.exists():
        other = find_conversion(local) or "is a file, a model is a folder with config.json"
        raise InputError(f"{name}: {other}")
    owner, _, model = name.partition("/")
    if name.startswith((".", "/", "~")) or not owner or not model or "/" in model:
        raise InputError(f"{name}: no such model folder")
    return _from_hub(name)


def local_model(path: Path) -> Path | None:
    """Return the folder of a model on this machine, a GGUF file's too; None if there is none.

    Raises:
        InputError: a GGUF file cannot be converted.
    """
    if (gguf := gguf_file(path)) is not None:
        from trainer.model.gguf.conversion import convert_gguf

        return convert_gguf(gguf.resolve())
    return path.resolve() if path.is_dir() else None


def model_digest(model_dir: Path, tokenizer_dir: Path | None = None) -> str:
    """Return the BLAKE3 hex digest of a model folder: config, weights and tokenizer.

    It includes the tokenizer: another one makes other samples of the same data.

    Args:
        tokenizer_dir: the folder of a tokenizer that replaces the model's.

    Raises:
        InputError: a file is missing or cannot be read.
    """
    from blake3 import blake3  # a launcher's machine may have none, and asks for folders alone

    hasher = blake3(weights_digest(model_dir).encode())
    for folder, name in _digest_files(model_dir, tokenizer_dir or model_dir):
        # Framed by name and size, so that bytes cannot move from one file to the next.
        hasher.update(f"{name}\0{(folder / name).stat().st_size}\0".encode())
        hasher.update(_read_bytes(folder / name))
    return hasher.hexdigest()


def digested_files(model_dir: Path) -> list[Path]:
    """Return a model's files beside its weights that decide what is computed and learned."""
    return [folder / name for folder, name in _digest_files(model_dir, model_dir)]


def _digest_files(model_dir: Path, tokenizer_dir: Path) -> list[tuple[Path, str]]:
    named = [(tokenizer_dir, name) for name in _DIGESTED]
    found = [each for each in ((model_dir, "config.json"), *named) if Path(*each).is_file()]
    return [*found, *((tokenizer_dir, name) for name in template_files(tokenizer_dir).values())]


def weights_digest(model_dir: Path) -> str:
    """Return the BLAKE3 hex digest of a model's tensors, in whatever files they are.

    Raises:
        InputError: a file is missing or cannot be read.
    """
    headers = read_headers(model_dir)
    files = sorted({header.file for header in headers.values()})
    with convert_read_errors(model_dir, InputError):
        states = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
        with log_if_slow(f"hashing {model_dir}"):
            return _hash_tensors(states, tuple(sorted(headers.items())))


@lru_cache(maxsize=4)
def _hash_tensors(
    states: tuple[tuple[Path, int, int], ...], headers: tuple[tuple[str, TensorHeader], ...]
) -> str:
    """Hash all tensors in the order of their names; once a process, while no file changes."""
    from blake3 import blake3

    hasher = blake3(max_threads=blake3.AUTO)
    with ExitStack() as opened:
        maps: dict[Path, memoryview] = {}
        for path, _, _ in states:
            file = opened.enter_context(open_file(path))
            mapped = opened.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            maps[path] = opened.enter_context(memoryview(mapped))
        total = sum(header.end - header.begin for _, header in headers)
        progress = opened.enter_context(
            report_progress("hashing the model's weights", total, "bytes")
        )
        for name, header in headers:
            hasher.update(f"{name}\0{header.dtype}\0{header.shape}\0".encode())
            with maps[header.file][header.begin : header.end] as values:
                hasher.update(values)
            progress.advance(header.end - header.begin)
    return hasher.hexdigest()


def _read_bytes(path: Path) -> bytes:
    with convert_read_errors(path, InputError):
        return read_file(path)


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
