"""Comparison of what must be equal on every host: Motley's code, Python, libraries. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from launcher.agent.checks.finding import Result
from launcher.inventory.facts.machine import LIBRARIES, Machine

UPDATE = "`launch cluster push`, or: `ansible-playbook recipes/gpu-training.yml --tags trainer`"
"""The remedy where a host has other code or other libraries."""


def compare_versions(machines: Mapping[str, Machine], here: Machine, head: str) -> list[Result]:
    """Return the checks `version`, `python` and `libraries` of every host.

    Args:
        machines: the hosts that answered, by name.
        here: the machine that the launcher runs on.
        head: the coordinator's host, whose Python is the reference for the others.
    """
    reference = machines.get(head, here)
    newest = _library_releases(machines, head)
    checks: list[Result] = []
    for name, machine in machines.items():
        checks += [
            _check_version(name, machine, machines, here),
            _check_python(name, machine, reference),
            _check_libraries(name, machine, newest, machines),
        ]
    return checks


def _check_version(
    name: str, machine: Machine, machines: Mapping[str, Machine], here: Machine
) -> Result:
    """Version skew fails: one run cannot mix versions of the protocol or of the optimizer."""
    if machine.code == here.code:
        return Result("version", name, "ok", _machine_label(machine))
    same = [other for other, found in machines.items() if found.code == here.code]
    who = ", ".join(["the launcher", *same])
    twins = [o for o, found in machines.items() if found.code == machine.code and o != name]
    also = f" (like {', '.join(twins)})" if twins else ""
    detail = f"{_machine_label(machine)}{also}, but {who}: {_machine_label(here)}"
    return Result("version", name, "fail", detail)


def _machine_label(machine: Machine) -> str:
    wheel = f", wheel {machine.wheel[:12]}" if machine.wheel else ""
    return f"Motley {machine.version}, code {machine.code[:12]}{wheel}"


def _check_python(name: str, machine: Machine, reference: Machine) -> Result:
    if machine.python == reference.python:
        return Result("python", name, "ok", machine.python)
    detail = f"{machine.python}, the coordinator has {reference.python}"
    minor = machine.python.rpartition(".")[0] == reference.python.rpartition(".")[0]
    remedy = "fine for training" if minor else "trains, but tests do not cover this mix"
    return Result("python", name, "warn", detail, remedy)


def _library_releases(machines: Mapping[str, Machine], head: str) -> dict[str, tuple[str, str]]:
    """Return for each library the reference release, and the host that has it."""
    order = sorted(machines, key=lambda name: name != head)
    return {
        library: (machines[name].libraries[library], name)
        for library in LIBRARIES
        for name in reversed(order)
        if library in machines[name].libraries
    }


@cache
def _locked_releases(library: str) -> set[str]:
    """Return the releases of a library in the locks: several where they depend on the Python."""
    text = files("launcher.locks").joinpath("trainer.txt").read_text("utf-8")
    return set(re.findall(rf"^{library}==(\S+)", text, re.MULTILINE))


def _check_libraries(
    name: str,
    machine: Machine,
    newest: Mapping[str, tuple[str, str]],
    machines: Mapping[str, Machine],
) -> Result:
    def is_split(library: str, release: str) -> bool:
        """Return whether the locks name both releases, each for another Python."""
        reference, host = newest[library]
        pythons = {each.python.rpartition(".")[0] for each in (machine, machines[host])}
        return len(pythons) > 1 and {release, reference} <= _locked_releases(library)

    other = [
        f"{library} {release} ({newest[library][0]} on {newest[library][1]})"
        for library, release in machine.libraries.items()
        if release != newest[library][0] and not is_split(library, release)
    ]
    if other:
        return Result("libraries", name, "warn", ", ".join(other))
    shown = [f"{k} {v}" for k, v in machine.libraries.items() if k in ("numpy", "torch")]
    return Result("libraries", name, "ok", ", ".join(shown) or "none for training")
