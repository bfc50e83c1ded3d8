"""The questions to a host, by name: JSON in, JSON out. Its agent answers, or this process.

The functions are those of the checks; this file only names them and turns their answers into plain
data. It runs on every host: nothing here may need the launcher's extras (Ansible, Fabric,
cryptography), and slow imports are made on demand.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.checks import host, link, unit_sandbox, unit_states
from launcher.checks import share as share_checks
from launcher.checks.finding import Finding
from launcher.facts import devices, gauges, machine, network
from launcher.supervisor import host_runs


def answer(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return this machine's answer to a question: JSON values only.

    Raises:
        ValueError: there is no such question: the caller is another version.
    """
    ask = _QUESTIONS.get(name)
    if ask is None:
        raise ValueError(f"no question {name!r} is known here (known: {', '.join(_QUESTIONS)})")
    return _plain(ask(**arguments))


def _plain(value: Any) -> Any:
    """Return dataclasses as mappings and tuples as lists, at any depth: JSON has neither."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _folder(path: str, least: int) -> Finding:
    return host.check_folder(Path(path), least)


def _model(config: Mapping[str, Any]) -> Finding:
    from launcher.checks import job

    return job.check_model(job.read_config(config))


def _model_content(config: Mapping[str, Any], state_folder: str) -> dict[str, str]:
    from launcher.checks import job

    return job.model_content(job.read_config(config), Path(state_folder))


def _file_content(path: str, state_folder: str) -> dict[str, str]:
    from launcher.checks import digests

    return digests.digests([Path(path)], Path(state_folder))


def _logits_content(path: str, state_folder: str) -> dict[str, str]:
    from launcher.checks import logits_folder

    return logits_folder.logits_content(Path(path), Path(state_folder))


def _training_data(path: str, taught: bool) -> Finding:
    from launcher.checks import job

    return job.check_training_data(Path(path), taught=taught)


def _data(path: str, remedy: str) -> Finding:
    from launcher.checks import job

    return job.check_data(Path(path), remedy)


def _model_folder(path: str) -> Finding:
    from launcher.checks import job

    return job.check_model_folder(Path(path))


def _text(path: str) -> Finding:
    from launcher.checks import job

    return job.check_text(Path(path))


def _output(path: str, run_id: str) -> Finding:
    from launcher.checks import job

    return job.check_output(Path(path), run_id)


def _memory(plan: Mapping[str, Any], config: Mapping[str, Any], hosts: Sequence[str]) -> Finding:
    from launcher.checks import job

    share = job.read_plan(plan)
    return job.check_memory(share, job.read_config(config), hosts)


def _own_settings(
    config: Mapping[str, Any], given: Sequence[str], rooms: Sequence[Mapping[str, Any]]
) -> Any:
    from launcher.checks import job
    from trainer.defaults import derive
    from trainer.model.memory_plan import Room

    wanted = job.read_config(config)
    folder = job.model_folder(wanted)
    return derive(wanted, given, folder, [Room(**room) for room in rooms])


_QUESTIONS: dict[str, Callable[..., Any]] = {
    "clock": time.time,
    "unfinished_runs": host_runs.unfinished_runs,
    "wanted_runs": host_runs.wanted_runs,
    "units": unit_states.show_units,
    "machine": machine.describe,
    "routes": network.routes,
    "gauges": gauges.read_gauges,
    "devices": devices.detect,
    "trainer": host.check_trainer,
    "cuda": host.check_trainer_cuda,
    "secure_boot": host.check_secure_boot,
    "sleep": host.check_sleep,
    "port": host.check_port,
    "listen": link.listen,
    "connect": link.connect,
    "folder": _folder,
    "fences": unit_sandbox.check_fences,
    "share": share_checks.check_share,
    "share_source": share_checks.source,
    "model": _model,
    "model_content": _model_content,
    "model_folder": _model_folder,
    "text": _text,
    "file_content": _file_content,
    "logits_content": _logits_content,
    "training_data": _training_data,
    "data": _data,
    "output": _output,
    "memory": _memory,
    "own_settings": _own_settings,
}
"""Every question. A function's arguments are the question's; what it returns is the answer."""
