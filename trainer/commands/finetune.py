"""`trainer finetune`: build the run config from a file and flags, then start the role."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from trainer.commands.run_options import collect_overrides, run_options
from trainer.config import run as run_config
from trainer.config.budget import apply_environment
from trainer.config.capabilities import check_backend, check_capability
from trainer.config.notify_command import read_notify_command
from trainer.config.parallel import GROUP_STRATEGIES, GroupStrategy
from trainer.config.run import SCRIPT, RunConfig
from trainer.config.script import read_script
from trainer.data.sources import refuse_pipe
from trainer.model.files import resolve_model
from trainer.planning.defaults import derive_settings, format_table, own_rooms, provisional_settings
from trainer.run.composition import preload
from trainer.run.distributed.environment import Environment, read_environment
from trainer.system.backends import RequestedBackend
from trainer.system.commandline.number import Threads
from trainer.system.errors import InputError
from trainer.system.process.prefork import fork_workers

_SETTINGS = {
    "task": "task",
    "num_classes": "num_classes",
    "model_dir": "model.path",
    "data": "data.train",
    "adapter": "model.adapter",
}


@click.command()
@click.argument("model_dir", required=False, type=click.Path())
@click.option(
    "--task",
    type=click.Choice(["classify", "causal-lm", "dpo"]),
    help="Classes, texts and conversations, or preferences; default: by the data.",
)
@click.option("--num-classes", type=int, help="Number of classes of a classify task.")
@click.option(
    "--data",
    type=click.Path(),
    metavar="FILE|DIR",
    help="Data of any format, or a folder of a teacher's logits.",
)
@click.option(
    "--adapter",
    type=click.Path(),
    metavar="DIR",
    help="A LoRA adapter of the model, from which the run begins.",
)
@click.option(
    "--script",
    "script_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A model, data and loss of your own, in place of MODEL_DIR and --data.",
)
@click.option(
    "--script-digest",
    metavar="HEX",
    help="Digest of the script that the run was started with; another one is refused.",
)
@run_options("sample")
@click.option(
    "--role",
    type=click.Choice(["local", "coordinator", "worker"]),
    default="local",
    help="This process alone, the server of a run, or one of its workers.",
)
@click.option(
    "--bind",
    metavar="HOST:PORT",
    default="127.0.0.1:9000",
    help="Address on which a coordinator listens for workers.",
)
@click.option("--coordinator", metavar="HOST:PORT", help="The coordinator's address, for a worker.")
@click.option(
    "--expect-workers", type=click.IntRange(min=1), help="Start when this many workers have joined."
)
@click.option(
    "--rank",
    type=click.IntRange(0, 65535),
    help="Default: from the certificate; with --distributed from the launcher.",
)
@click.option(
    "--distributed",
    is_flag=True,
    help="Run as one of equal processes, started by torchrun, Slurm, Kubernetes or by hand.",
)
@click.option(
    "--world-size", type=click.IntRange(min=1), help="Number of processes, if started by hand."
)
@click.option("--master", metavar="HOST:PORT", help="Address of rank 0, if started by hand.")
@click.option(
    "--gpus",
    metavar="LIST",
    help="Required devices, such as 0 or a UUID; a coordinator or a replica group takes several:"
    " 0,1.",
)
@click.option(
    "--strategy",
    type=click.Choice(GROUP_STRATEGIES),
    help="How the --gpus of a worker share one replica.",
)
@click.option(
    "--gpu-backend",
    type=click.Choice(["auto", "cuda", "wgpu", "cpu"]),
    default="auto",
    help="A named backend is required; auto uses the first that works.",
)
@click.option("--threads", type=Threads(), help="CPU threads of one worker.")
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
    """Fine-tune MODEL_DIR on data of any format, or on a teacher's logits; or train a script.

    Without --role it runs in one process; `--role coordinator` starts the server, and a worker for
    each of --gpus; `--role worker` joins a coordinator; `--distributed` needs none. Without
    --config the settings are derived from data and model; options override them.
    """
    environment = _read_rank_environment(role, flags)
    if environment is not None:
        fork_workers(preload.load_rank)
    elif role == "worker":
        fork_workers(lambda: preload.load_worker(flags["gpu_backend"], flags["strategy"]))
    gpus = [gpu.strip() for gpu in (flags["gpus"] or "").split(",") if gpu.strip()]
    _check_devices(gpus, role, flags["gpu_backend"], flags["strategy"])
    path, digest = flags["script_path"], flags["script_digest"]
    script = read_script(path, digest) if path else None
    if source is None and script is None and not (flags["model_dir"] and flags["data"]):
        raise InputError("give MODEL_DIR and --data FILE, --script FILE, or --config FILE|PRESET")
    given = collect_overrides(flags, _SETTINGS, settings)
    if script is not None and given.setdefault("task", SCRIPT) != SCRIPT:
        raise InputError(f"--script: its loss is its task; leave out --task {given['task']}")
    derives = source is None and script is None
    config = run_config.load_config(
        source, provisional_settings(given) | given if derives else given
    )
    if script is None and config.task == SCRIPT:
        raise InputError("task script: name the script with --script FILE; no config names one")
    if script is None and digest:
        raise InputError("--script-digest: needs --script FILE")
    alone = role == "local" and environment is None
    if not alone and script is None:
        for path in filter(None, (config.data.train, config.data.validation)):
            refuse_pipe(Path(path))
    notes: list[str] = []
    if derives:
        # Members of a run differ in memory, but must have the same settings.
        config, notes = _follow_data(config, given, flags["gpu_backend"] if alone else None)
    notify: tuple[str, ...] = ()
    if role != "worker":
        notify = read_notify_command(flags["notify"])
        budget = apply_environment(config.budget, os.environ)
        config = config.model_copy(update={"budget": budget})
    elif flags["notify"] is not None:
        raise InputError("--notify: a worker sends no notifications; give it to the coordinator")
    check_capability(config, "exchange" if environment is None else "ranks")
    if script is not None and flags["strategy"] is not None:
        check_capability(config, flags["strategy"])
    from trainer.run.composition import roles

    place = roles.Placement(
        gpus=gpus,
        backend=flags["gpu_backend"],
        threads=flags["threads"],
        rank=flags["rank"],
        tls_dir=flags["tls_dir"],
        strategy=flags["strategy"],
        script=script,
    )
    run_id = run_id or config.name
    if environment is not None:
        code = roles.run_distributed(config, run_id, place, environment, notes, notify)
    elif role == "local":
        code = roles.run_local(config, run_id, place, notes, notify)
    elif role == "coordinator":
        notified = (flags["expect_workers"], notes, notify)
        code = roles.run_coordinator(config, run_id, place, flags["bind"], *notified)
    else:
        if not flags["coordinator"]:
            raise InputError("--role worker needs --coordinator HOST:PORT")
        code = roles.run_worker(config, run_id, place, flags["coordinator"])
    click.get_current_context().exit(code)


def _check_devices(
    gpus: list[str], role: str, backend: RequestedBackend, strategy: GroupStrategy | None
) -> None:
    """Refuse devices that no process, or no replica group, computes on together."""
    if strategy is None:
        if role != "coordinator" and len(gpus) > 1:
            raise InputError(
                f"--gpus {','.join(gpus)}: one process computes on one device; --role coordinator "
                "starts a worker for each, with --strategy the GPUs of a worker share one replica"
            )
    elif role != "worker":
        raise InputError("--strategy is for --role worker: its devices share one replica")
    elif len(set(gpus)) < 2 or len(set(gpus)) < len(gpus):
        raise InputError(
            f"--strategy {strategy} needs two or more different devices: --gpus 0,1, not "
            f"{','.join(gpus) or 'none'}"
        )
    else:
        check_backend(backend, strategy)


def _read_rank_environment(role: str, flags: dict[str, Any]) -> Environment | None:
    """Return this process's place among equal ones; None without --distributed."""
    size, master = flags["world_size"], flags["master"]
    if not flags["distributed"]:
        if size is not None or master is not None:
            raise InputError("--world-size and --master need --distributed")
        return None
    if role != "local":
        raise InputError(f"--distributed: there is no coordinator, so no --role {role}")
    check_backend(flags["gpu_backend"], "ranks")
    return read_environment(os.environ, world_size=size, rank=flags["rank"], master=master)


def _follow_data(
    config: RunConfig, given: dict[str, Any], backend: str | None
) -> tuple[RunConfig, list[str]]:
    """Derive what is not given from data and model; return the config and lines that explain it.

    Args:
        backend: where it computes, which limits memory; None: memory is ignored.
    """
    rooms = () if backend is None else own_rooms(backend)
    found = derive_settings(config, given, resolve_model(config.model.path), rooms)
    completed = config.with_settings({part.key: part.value for part in found})
    return completed, format_table(found, completed.output)
