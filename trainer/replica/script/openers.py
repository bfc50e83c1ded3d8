"""The backends on which a script computes: those of torch."""

from __future__ import annotations

from trainer.replica.backend import BackendRequest, Opener, UnusableError, cuda_device
from trainer.replica.base import Replica
from trainer.replica.script.opened import OpenedScript
from trainer.replica.script.replica import ScriptReplica
from trainer.system.backends import RequestedBackend


def script_openers(opened: OpenedScript) -> dict[RequestedBackend, Opener]:
    """Return what opens a script's replica on each backend."""

    def open_on(device: str, request: BackendRequest) -> Replica:
        return ScriptReplica(opened, request.config, device, request.threads)

    def refuse(_: BackendRequest) -> Replica:
        raise UnusableError("a script computes with torch")

    return {
        "cuda": lambda request: open_on(cuda_device(request.gpu), request),
        "wgpu": refuse,
        "cpu": lambda request: open_on("cpu", request),
    }
