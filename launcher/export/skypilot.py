"""The SkyPilot task of a run; SkyPilot rents nodes, copies the folder to them, and starts it.

Format: https://docs.skypilot.co/en/latest/reference/yaml-spec.html (0.14).
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from launcher.errors import ConfigError
from launcher.export.job import SETUP, ExportedJob, Rendered
from launcher.export.torchrun import SCRIPT, torchrun_script

TASK = "task.yaml"
_PYTHON = """\
# Motley needs Python 3.11; if the image has an earlier one, SkyPilot's conda installs 3.12.
python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  export PYTHON="$HOME/motley-python/bin/python3"
  [ -x "$PYTHON" ] || conda create --yes --quiet --prefix "$HOME/motley-python" python=3.12
}"""
_NAMES = {
    "V100-32G": "V100-32GB",
    "A100-40G": "A100",
    "A100-80G": "A100-80GB",
    "H100-80G": "H100",
    "A6000": "RTXA6000",
}
"""SkyPilot's name of a card, if it is another than ours."""


def render_skypilot(job: ExportedJob) -> Rendered:
    """Return the task, and the script that it runs on each node.

    Raises:
        ConfigError: checkpoints in parts over several nodes, which share no folder.
    """
    target = job.target
    if job.config.checkpoint.sharded and target.nodes > 1:
        raise ConfigError(
            "checkpoint.sharded: SkyPilot's nodes share no folder, and every rank writes a"
            " part; leave the setting out"
        )
    device = target.device
    resources: dict[str, Any] = {"cpus": f"{target.devices}+"}
    if device is not None:
        resources = {"accelerators": f"{_NAMES.get(device, device)}:{target.devices}"}
    name = job.label.rstrip("._-")  # SkyPilot's names begin with a letter and end with neither
    task: dict[str, Any] = {
        "name": name,
        "workdir": ".",
        "num_nodes": target.nodes,
        "resources": resources,
        "setup": f"{_PYTHON}\nsh {SETUP}\n",
        "run": f'sh {SCRIPT} "$SKYPILOT_NODE_RANK" "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
    }
    text = f"# Run {job.run_id}: {target.text}\n" + yaml.safe_dump(task, sort_keys=False, width=200)
    cluster = shlex.quote(name)
    steps = (
        f"sky launch -c {cluster} {TASK}",
        f"rsync -a {cluster}:sky_workdir/output/ output/    # when it is done",
        f"sky down {cluster}",
    )
    return Rendered(files={TASK: text, SCRIPT: torchrun_script(job)}, steps=steps)
