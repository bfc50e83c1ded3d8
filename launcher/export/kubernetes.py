"""A run for Kubernetes: a JobSet of one pod for each node, its volume, and its image.

The JobSet (jobset.x-k8s.io/v1alpha2, which Kubeflow Trainer runs its jobs on too) starts an Indexed
Job. Pods find node 0 by its name below the JobSet's headless service. If a pod fails, all start
again and resume.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from launcher.errors import ConfigError
from launcher.export.job import (
    GRACE,
    REQUIREMENTS,
    RESTARTS,
    TORCH,
    ExportedJob,
    Rendered,
    pip_arguments,
)
from launcher.export.torchrun import PORT, SCRIPT, torchrun_script

OBJECTS, VOLUME, IMAGE = "jobset.yaml", "files.yaml", "Containerfile"
_MOUNT = "/motley"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # of the container: its default, 64 MiB, is too small
_ROLE = "node"
_ID = 1000
_USER = {
    "runAsNonRoot": True,
    "runAsUser": _ID,
    "runAsGroup": _ID,
    "fsGroup": _ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The image's user, to whom the volume's files belong."""
_NO_PRIVILEGES = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_MEMORY = 8
"""GiB of main memory that are requested for each process; larger models need more."""
_LONGEST = 63
"""Characters of a pod's host name (RFC 1123)."""


def render_kubernetes(job: ExportedJob) -> Rendered:
    """Return the objects and the image's file.

    Raises:
        ConfigError: the run id is too long for a pod's host name.
    """
    name = re.sub(r"[._]", "-", job.label).strip("-")
    pod = f"{name}-{_ROLE}-0-{job.target.nodes - 1}"
    if len(pod) > _LONGEST:
        raise ConfigError(
            f"run id {job.run_id}: {len(pod) - _LONGEST} characters too long for the names of pods;"
            " set a shorter name in the config"
        )
    image = f"motley:{re.sub(r'[^A-Za-z0-9_.-]', '-', job.version)}"
    files = {
        OBJECTS: _build_manifests(job, _build_jobset(job, name, image)),
        VOLUME: _build_manifests(job, _build_volume_claim(name), _build_loader_pod(name, image)),
        IMAGE: _build_containerfile(job),
        ".dockerignore": f"*\n!{job.wheel}\n!{REQUIREMENTS}\n!{TORCH}\n",
        SCRIPT: torchrun_script(job, restarts=0),
    }
    files_pod = f"{name}-files"
    steps = (
        f"podman build -t {image} .    # push it to a registry, and name it in the two files",
        f"kubectl apply -f {VOLUME} && kubectl wait --for=condition=Ready pod/{files_pod}",
        f"kubectl cp . {files_pod}:{_MOUNT}",
        f"kubectl apply -f {OBJECTS}",
        f"kubectl cp {files_pod}:{_MOUNT}/output output    # when it is done",
    )
    return Rendered(files=files, steps=steps)


def _build_jobset(job: ExportedJob, name: str, image: str) -> dict[str, Any]:
    target = job.target
    cards = {} if target.device is None else {"nvidia.com/gpu": str(target.devices)}
    requests = {
        "cpu": str(target.devices * target.cores_per_process),
        "memory": f"{target.devices * _MEMORY}Gi",
        **cards,
    }
    container = {
        "name": "trainer",
        "image": image,
        "workingDir": _MOUNT,
        # Kubernetes puts the pod's number in; no shell reads the line.
        "command": ["sh", SCRIPT, "$(JOB_COMPLETION_INDEX)", f"{name}-{_ROLE}-0-0.{name}"],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": requests, **({"limits": cards} if cards else {})},
        "securityContext": _NO_PRIVILEGES,
        "volumeMounts": [
            {"name": "files", "mountPath": _MOUNT},
            {"name": "memory", "mountPath": _SHARED_MEMORY},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "securityContext": _USER,
        "containers": [container],
        "volumes": [
            {"name": "files", "persistentVolumeClaim": {"claimName": f"{name}-files"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    indexed = {
        "completionMode": "Indexed",
        "completions": target.nodes,
        "parallelism": target.nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            # Pods look for node 0 before it is ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": [{"name": _ROLE, "replicas": 1, "template": {"spec": indexed}}],
        },
    }


def _build_volume_claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{name}-files"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "200Gi"}}},
    }


def _build_loader_pod(name: str, image: str) -> dict[str, Any]:
    """Return a pod that only holds the volume open, for `kubectl cp`."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{name}-files"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": _USER,
            "containers": [
                {
                    "name": "files",
                    "image": image,
                    "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
                    "securityContext": _NO_PRIVILEGES,
                    "command": ["sleep", "infinity"],
                    "volumeMounts": [{"name": "files", "mountPath": _MOUNT}],
                }
            ],
            "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": f"{name}-files"}}],
        },
    }


def _build_containerfile(job: ExportedJob) -> str:
    lines = " \\\n    && ".join(
        f"pip --no-cache-dir {arguments}" for arguments in pip_arguments(job)
    )
    return f"""\
# Motley {job.version} with its locked packages; the run's files are on the volume.
FROM docker.io/library/python:3.12-slim
WORKDIR /install
COPY {REQUIREMENTS} {TORCH} {job.wheel} ./
RUN {lines} \\
    && python -P -m trainer.system.passes \\
    && useradd --create-home --uid {_ID} motley
USER {_ID}
WORKDIR {_MOUNT}
"""


def _build_manifests(job: ExportedJob, *objects: dict[str, Any]) -> str:
    return f"# Run {job.run_id}: {job.target.text}\n" + yaml.safe_dump_all(objects, sort_keys=False)
