"""The folder of an exported run: config, model, data, Motley, and a checkpoint to resume from.

run.yaml            the settings; every path is in this folder
inputs/             model, train and validation, each a file with its suffix or a folder
output/             the trainer's output, with the newest checkpoint of an existing run
motley-*.whl        this version; requirements*.txt lock its packages, setup.sh installs all
job.sbatch, ...     the files of the system
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ConfigError
from launcher.export.job import (
    CONFIG,
    OUTPUT,
    REQUIREMENTS,
    SETUP,
    TORCH,
    ExportedJob,
    Rendered,
    setup_script,
)
from launcher.export.target import Target, check_strategy
from launcher.transfer.wheel import choose_wheel
from trainer.checkpoint.reader import FOLDER, SHARDED, complete_checkpoints, read_owner, read_step
from trainer.config.run import RunConfig
from trainer.data.sources import HUB
from trainer.model.files import local_model
from trainer.system.errors import InputError, StorageError
from trainer.system.storage.atomic_folder import Disk, FolderWriter, point_link, read_manifest

INPUTS = "inputs"
METRICS = "metrics.jsonl"
POINTERS = ("latest", "best")
_PIECE = 4 << 20
Render = Callable[[ExportedJob], Rendered]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written."""

    folder: Path
    run_id: str
    step: int
    """Steps that are done; 0 for a new run."""
    steps: tuple[str, ...]
    """Next steps of the user."""


def export_run(
    run_id: str,
    config: RunConfig,
    target: Target,
    render: Render,
    folder: Path,
    wheel: Path | None = None,
) -> Exported:
    """Write a run's folder for a system; it appears whole or not at all.

    Args:
        config: with absolute paths, or a model's hub name.
        wheel: Motley for the target; None builds one of this checkout.

    Raises:
        ConfigError: the run does not fit the target, an input is missing, or the folder exists.
    """
    if config.budget is not None:
        try:
            config.budget.check_prices()
        except InputError as error:
            raise ConfigError(f"{error}; its hosts are the target's") from None
    sources = _list_inputs(config)
    model = sources.get("model.path")
    check_strategy(config, target, model)
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder}: exists already; name another folder with --into")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"{folder.absolute().parent}: is not a folder; create it first")
    try:
        scratch = tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        made = Path(scratch, "run")
        found = _write_bundle(made, run_id, config, target, render, sources, wheel)
        made.rename(folder)
        return Exported(folder=folder, run_id=run_id, step=found[0], steps=found[1])
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _list_inputs(config: RunConfig) -> dict[str, Path]:
    """Return what is handed over, by its setting's dotted key; a GGUF file's folder."""
    if config.model.adapter is not None:
        raise ConfigError("model.adapter: is not exported; merge it into the model first")
    if config.training.sample_prompts is not None:
        raise ConfigError("training.sample_prompts: is not exported; leave it out")
    found = {"data.train": Path(config.data.train)}
    if config.data.validation is not None:
        found["data.validation"] = Path(config.data.validation)
    for key, path in [*found.items()]:
        if HUB.fullmatch(str(path)):
            del found[key]  # the trainer downloads it there
        elif not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{key}: {path} is not a file or folder")
    path = Path(config.model.path)
    if path.is_absolute():
        model = local_model(path)
        if model is None or not (model / "config.json").is_file():
            raise ConfigError(f"model.path: {path} is not a model folder: it has no config.json")
        found["model.path"] = model
    return found


def _write_bundle(
    made: Path,
    run_id: str,
    config: RunConfig,
    target: Target,
    render: Render,
    sources: dict[str, Path],
    wheel: Path | None,
) -> tuple[int, tuple[str, ...]]:
    (made / INPUTS).mkdir(parents=True, mode=0o755)
    settings: dict[str, str] = {"output": OUTPUT}
    for key, source in sources.items():
        # The suffix tells how a text is read.
        kept = (one for one in source.suffixes[-2:] if re.fullmatch(r"\.[a-z]{1,7}", one))
        name = f"{INPUTS}/{key.rpartition('.')[2]}{''.join(kept)}"
        if key == "model.path":
            name = f"{INPUTS}/model"
            hidden = shutil.ignore_patterns(".*")
            shutil.copytree(source, made / name, copy_function=_link_or_copy, ignore=hidden)
        elif source.is_dir():
            shutil.copytree(source, made / name)
        else:
            shutil.copyfile(source, made / name)
        settings[key] = name
    facts = choose_wheel(wheel, made)
    if facts.path.parent != made.absolute():
        shutil.copyfile(facts.path, made / facts.path.name)
    inside = config.with_settings(settings)
    saved = inside.checkpoint.model_copy(update={"folder": None})
    budget = inside.budget and inside.budget.model_copy(update={"ledger": None})
    inside = inside.model_copy(update={"checkpoint": saved, "budget": budget})
    job = ExportedJob(
        run_id=run_id, config=inside, target=target, version=facts.version, wheel=facts.path.name
    )
    rendered = render(job)
    step = _hand_over(run_id, config, made / OUTPUT)
    build = "cpu" if target.device is None else "cuda"
    texts = {
        CONFIG: f"# Run {run_id} for {target.text}; every setting: docs/config.md\n"
        + inside.to_yaml(),
        REQUIREMENTS: facts.locks["trainer"],
        TORCH: facts.locks[f"torch-{build}"],
        SETUP: setup_script(job),
        **rendered.files,
    }
    for name, text in texts.items():
        (made / name).write_text(text, encoding="utf-8")
        (made / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return step, rendered.steps


def _hand_over(run_id: str, config: RunConfig, output: Path) -> int:
    """Copy what a run needs to continue elsewhere; return its step."""
    output.mkdir()
    home = Path(config.output)
    source = Path(config.checkpoint.folder or home / FOLDER)
    made = _bring_checkpoints(source, output / FOLDER, run_id)
    if not made:
        return 0
    if (home / METRICS).is_file():
        shutil.copyfile(home / METRICS, output / METRICS)
    return max(map(read_step, made))


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link a model's file, which is never edited in place; copy it to another file system."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _newest_checkpoint(folder: Path, run_id: str) -> Path | None:
    """Return a run's newest complete checkpoint, whole or in parts; None if there is none."""
    found = [*complete_checkpoints(folder), *complete_checkpoints(folder / SHARDED)]
    own = [path for path in found if read_owner(path) == run_id]
    return max(own, key=read_step, default=None)


def _bring_checkpoints(source: Path, target: Path, run_id: str) -> list[Path]:
    """Copy the newest checkpoint of a run, and the one that `best` points to; return the copies.

    Every byte is compared with the manifest on the way.

    Args:
        source, target: folders of checkpoints; `target` has none yet.

    Raises:
        ConfigError: a checkpoint is damaged.
        OSError: the disk is full, or a folder cannot be written.
    """
    newest = _newest_checkpoint(source, run_id)
    wanted = {} if newest is None else {newest: newest.parent.name == SHARDED}
    pointed: dict[str, str] = {}
    for pointer in POINTERS:
        link = source / pointer
        # A name alone is taken from a link: it leads nowhere but into its folder.
        path = source / link.readlink().name if link.is_symlink() else None
        if path in complete_checkpoints(source) and read_owner(path) == run_id:
            wanted.setdefault(path, False)
            pointed[pointer] = path.name
    made: list[Path] = []
    for path, in_parts in sorted(wanted.items(), key=lambda one: read_step(one[0])):
        parent = target / SHARDED if in_parts else target
        parent.mkdir(parents=True, exist_ok=True)
        made.append(_copy_checkpoint(path, parent))
    for pointer, name in pointed.items():
        point_link(Disk(), target, pointer, name)
    return made


def _copy_checkpoint(source: Path, parent: Path) -> Path:
    try:
        records = read_manifest(source)
        writer = FolderWriter(Disk(), parent, source.name)
        try:
            for name, record in records.items():
                if writer.write_file(name, _read_chunks(source / name)) != record:
                    raise StorageError(f"{source / name}: it does not match the manifest")
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise
    except StorageError as error:
        raise ConfigError(f"{error}; remove {source}, or copy it again") from None


def _read_chunks(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
