"""The script that starts a node's processes with torchrun; SkyPilot and Kubernetes run it too."""

from __future__ import annotations

import shlex

from launcher.export.job import RESTARTS, SETUP, ExportedJob, Rendered

SCRIPT = "torchrun.sh"
PORT = 29500


def torchrun_script(job: ExportedJob, restarts: int = RESTARTS) -> str:
    """Return the script; its arguments are the node's number and the address of node 0."""
    target = job.target
    sizes = shlex.join(
        [
            *("--nnodes", str(target.nodes), "--nproc-per-node", str(target.devices)),
            *("--master-port", str(PORT), "--max-restarts", str(restarts)),
        ]
    )
    usage = f"usage: {SCRIPT} NODE MASTER: a number below {target.nodes}, and node 0's address"
    check = (
        "" if target.nodes == 1 else f"[ $# = 2 ] || {{ echo {shlex.quote(usage)} >&2; exit 2; }}\n"
    )
    return f"""\
#!/bin/sh
# The processes of one node of run {job.run_id}: {target.text}.
# A stopped or failed run resumes from its newest checkpoint.
set -eu
cd "$(dirname "$0")"
{check}python=.venv/bin/python
[ -x "$python" ] || python=python3    # an image has all that is needed
exec "$python" -P -m torch.distributed.run {sizes} \\
    --node-rank "${{1:-0}}" --master-addr "${{2:-127.0.0.1}}" -m trainer {job.finetune_arguments}
"""


def render_torchrun(job: ExportedJob) -> Rendered:
    """Return the script, and what to run on which node."""
    hosts = job.target.hosts
    if job.target.nodes == 1:
        lines = [f"on the node: sh {SETUP}, then: sh {SCRIPT}"]
    elif hosts:
        master = hosts[0][1]
        started = (
            (name, shlex.join(["sh", SCRIPT, str(node), master]))
            for node, (name, _) in enumerate(hosts)
        )
        lines = [f"on every node: sh {SETUP}", *(f"on {name}: {text}" for name, text in started)]
    else:
        lines = [f"on every node: sh {SETUP}, then: sh {SCRIPT} NODE MASTER"]
    return Rendered(
        files={SCRIPT: torchrun_script(job)}, steps=("copy this folder to every node", *lines)
    )
