"""The batch script of a run for Slurm: srun starts a process for each device.

Slurm's own signal comes `GRACE` seconds before the time limit, so the run saves and ends; a job
that Slurm queues again, or that is submitted again, resumes.
"""

from __future__ import annotations

from launcher.export.job import CONFIG, GRACE, SETUP, ExportedJob, Rendered

SCRIPT = "job.sbatch"


def render_slurm(job: ExportedJob) -> Rendered:
    """Return the batch script; partition, account and time are sbatch's options."""
    target = job.target
    options = {
        "job-name": job.label,
        "nodes": target.nodes,
        "ntasks-per-node": target.devices,
        "cpus-per-task": target.cores_per_process,
        **({} if target.device is None else {"gpus-per-node": target.devices}),
        "output": "slurm-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{GRACE}",
    }
    lines = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items())
    text = f"""\
#!/bin/bash
{lines}
#SBATCH --requeue
# Run {job.run_id}: {target.text}. Submit it in its folder, which all nodes must see.
set -eu
[ -f {CONFIG} ] || {{ echo "submit this script in the folder of {CONFIG}" >&2; exit 2; }}
python=.venv/bin/python
[ -x "$python" ] || python=python3    # an image has all that is needed
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    "$python" -P -m trainer {job.finetune_arguments}
"""
    steps = (
        "copy this folder to storage that all nodes see",
        f"there: sh {SETUP}",
        f"sbatch {SCRIPT}    # with --partition, --account and --time as the cluster needs",
    )
    return Rendered(files={SCRIPT: text}, steps=steps)
