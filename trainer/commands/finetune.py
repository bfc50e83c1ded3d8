"""`trainer finetune`: the run config from a file and flags, then the role that was asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from trainer.commands.run_options import overrides, run_options
from trainer.config import run as run_config
from trainer.config.run import RunConfig
from trainer.defaults import derive, own_rooms, provisional, table
from trainer.errors import InputError
from trainer.model.files import resolve_model
from trainer.process.prefork import fork_workers

_SETTINGS = {
    "task": "task",
    "num_classes": "num_classes",
    "model_dir": "model.path",
    "data": "data.train",
}


@click.command()
@click.argument("model_dir", required=False, type=click.Path())
@click.option("--task", type=click.Choice(["classify", "causal-lm"]))
@click.option("--num-classes", type=int, help="Number of classes of a classify task.")
@click.option(
    "--data",
    type=click.Path(),
    metavar="FILE|DIR",
    help="JSON Lines, or a folder of a teacher's logits.",
)
@run_options("sample")
@click.option(
    "--role",
    type=click.Choice(["local", "coordinator", "worker"]),
    default="local",
    show_default=True,
)
@click.option("--bind", metavar="HOST:PORT", default="127.0.0.1:9000", show_default=True)
@click.option("--coordinator", metavar="HOST:PORT", help="The coordinator's address, for a worker.")
@click.option(
    "--expect-workers", type=click.IntRange(min=1), help="Start when this many have joined."
)
@click.option("--rank", type=click.IntRange(0, 65535), help="Default: from the certificate.")
@click.option(
    "--gpus",
    metavar="LIST",
    help="Required devices, such as 0 or a UUID; a coordinator takes several: 0,1.",
)
@click.option(
    "--gpu-backend",
    type=click.Choice(["auto", "cuda", "wgpu", "cpu"]),
    default="auto",
    show_default=True,
    help="A named backend is required; auto takes the first that works.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of one worker.")
@click.option(
    "--tls",
    "tls_dir",
    type=click.Path(),
    metavar="DIR",
    help="ca.pem, cert.pem and key.pem of this process.",
)
def finetune(
    source: str | None, settings: tuple[str, ...], run_id: str | None, role: str, **flags: Any
) -> None:
    """Fine-tune MODEL_DIR on JSON Lines data, or on a teacher's logits.

    Without --role it runs alone; `--role coordinator` starts the server, and one worker for
    each of --gpus; `--role worker` joins a coordinator. Without --config the settings follow from
    data and model; what is given wins.
    """
    if role == "worker":
        fork_workers(lambda: _load_worker(flags["gpu_backend"]))
    if source is None and not (flags["model_dir"] and flags["data"]):
        raise InputError("give MODEL_DIR and --data FILE, or --config FILE|PRESET")
    given = overrides(flags, _SETTINGS, settings)
    notes: list[str] = []
    if source is None:
        # Members of a run have different memory, and must have the same settings.
        backend = flags["gpu_backend"] if role == "local" else None
        config, notes = _follow_data(given, backend)
    else:
        config = run_config.load(source, given)
    gpus = [gpu.strip() for gpu in (flags["gpus"] or "").split(",") if gpu.strip()]
    if role != "coordinator" and len(gpus) > 1:
        raise InputError(
            f"--gpus {flags['gpus']}: one process computes on one device; --role coordinator "
            "starts a worker for each"
        )
    from trainer import roles

    place = roles.Placement(
        gpus=gpus,
        backend=flags["gpu_backend"],
        threads=flags["threads"],
        rank=flags["rank"],
        tls_dir=flags["tls_dir"],
    )
    run_id = run_id or config.name
    if role == "local":
        code = roles.run_local(config, run_id, place, notes)
    elif role == "coordinator":
        expected = flags["expect_workers"]
        code = roles.run_coordinator(config, run_id, place, flags["bind"], expected, notes)
    else:
        if not flags["coordinator"]:
            raise InputError("--role worker needs --coordinator HOST:PORT")
        code = roles.run_worker(config, run_id, place, flags["coordinator"])
    click.get_current_context().exit(code)


def _follow_data(given: dict[str, Any], backend: str | None) -> tuple[RunConfig, list[str]]:
    """Derive a run's config from its data and model; return it and lines that explain it.

    Args:
        backend: what it computes on, for the memory there is; None: memory is not looked at.
    """
    config = run_config.load(None, provisional(given) | given)
    rooms = () if backend is None else own_rooms(backend)
    found = derive(config, given, resolve_model(config.model.path), rooms)
    settled = config.with_settings({part.key: part.value for part in found})
    return settled, table(found, settled.output)


def _load_worker(backend: str) -> None:
    """Import a worker's libraries without opening a device; a missing one is reported at use."""
    from trainer import roles

    with contextlib.suppress(ImportError, OSError):
        roles.load_worker(backend)
