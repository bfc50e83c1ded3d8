"""What a replica group computes, beside one replica: `python -m … FOLDER`.

Each case is `NAME.json` (model folder, strategy, processes), `NAME.yaml` (config) and
`NAME.safetensors` (samples); the answer is `NAME.npz`. `refused` is what a group says of a member
with another torch, `starved` how one ends whose member runs out of memory, `hung` how one ends
whose member no longer takes part.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from trainer.config.run import RunConfig, load_config
from trainer.data.tokens import Encoded
from trainer.run.distributed.group import member as group_member
from trainer.run.distributed.group import setup as group_setup
from trainer.run.distributed.group.link import GroupLink, unpack_samples
from trainer.run.distributed.group.member import run_member
from trainer.run.distributed.group.processes import Members
from trainer.run.distributed.group.setup import GroupSetup
from trainer.system.errors import RefusedError, UnreachableError

HANGS = 15.0
"""Seconds: healthy collectives take less on a busy machine, the first of them too."""


def main(folder: Path) -> None:
    """Answer every case."""
    cases = sorted(folder.glob("*.json"))
    tasks = [json.loads(case.read_text()) for case in cases]
    # Before the first of them opens anything.
    groups = [Members(["cpu"] * task["processes"], run_member) for task in tasks]
    odd_group = Members(["cpu", "cpu"], serve_with_another_torch)
    starved = start_starved_group(folder)
    hung = start_hung_group(folder, tasks[0], load_config(cases[0].with_suffix(".yaml")))
    for case, task, members in zip(cases, tasks, groups, strict=True):
        batch = unpack_samples(load_file(case.with_suffix(".safetensors")))
        config = load_config(case.with_suffix(".yaml"))
        np.savez(case.with_suffix(".npz"), **answer(task, config, batch, members))  # type: ignore[arg-type]  # the stubs take no names from a dict
        assert not any(is_running(pid) for pid in members.pids)
    case, task = cases[0], tasks[0]
    setup = make_setup(task, load_config(case.with_suffix(".yaml")), odd_group)
    (folder / "refused").write_text(refusal(setup, odd_group))
    code = os.waitstatus_to_exitcode(os.waitpid(starved, 0)[1])
    (folder / "starved.json").write_text(json.dumps([code, (folder / "starved").read_text()]))
    assert os.waitstatus_to_exitcode(os.waitpid(hung, 0)[1]) == 0


def is_running(pid: int) -> bool:
    """Whether a process is there, even one that has ended and is not reaped yet."""
    return Path(f"/proc/{pid}").exists()


def serve_with_another_torch(link: GroupLink, rank: int) -> int:
    """Be a member of another installation."""
    group_setup.version = lambda _: "1.0"
    return run_member(link, rank)


def start_starved_group(folder: Path) -> int:
    """Start a group whose member runs out of memory; return its leader's process id."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(folder / "starved", os.O_WRONLY | os.O_CREAT, 0o644), 2)
    group_member._serve_leader = lambda *_: int(np.empty(1 << 50)[0])
    Members(["cpu", "cpu"], run_member).collect_answers()  # until the leader's watch ends it
    os._exit(0)


def start_hung_group(folder: Path, task: dict, config: RunConfig) -> int:
    """Start a group of three of which one lives and does nothing; return its leader's process id.

    Why it ends, its exit code and its last collectives are in `hung.json`.
    """
    pid = os.fork()
    if pid:
        return pid
    tree = config.model_dump() | {"output": str(folder / "hung"), "parallel": {"timeout": HANGS}}
    config = RunConfig.model_validate(tree)
    said = os.open(folder / "hung-said", os.O_RDWR | os.O_CREAT, 0o644)
    os.dup2(said, 2)
    pid = os.fork()
    if pid:  # the leader's watch may end it
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        records = [json.loads(path.read_bytes()) for path in folder.glob("hung/*/*.json")]
        text = (folder / "hung-said").read_text()
        (folder / "hung.json").write_text(json.dumps([code, text, records]))
        os._exit(0)
    members = Members(["cpu"] * 3, serve_and_hang)
    from trainer.run.distributed.group.part import broadcast_weights
    from trainer.run.distributed.group.replica import GroupReplica

    group = GroupReplica(make_setup(task, config, members), members)
    try:
        for _ in range(100):
            members.send_command_to_all({"command": "weights"})
            group._explain_errors(
                lambda: broadcast_weights(group.layout, np.zeros(group.layout.size, np.float32))
            )
    except UnreachableError as error:
        sys.stderr.write(f"trainer: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    os._exit(1)


def serve_and_hang(link: GroupLink, rank: int) -> int:
    """Be a member; rank 1 gives signs of life and takes part in nothing but the start."""
    if rank == 1:
        group_member._execute_command = lambda *_: time.sleep(3600)
    return run_member(link, rank)


def refusal(setup: GroupSetup, members: Members) -> str:
    """Return why a group does not open."""
    from trainer.run.distributed.group.replica import GroupReplica

    try:
        GroupReplica(setup, members)
    except RefusedError as error:
        return str(error)
    return "not refused"


def make_setup(task: dict, config: RunConfig, members: Members) -> GroupSetup:
    """Return a case's setup."""
    devices, store = members.devices, members.store
    return GroupSetup(config, Path(task["model"]), "cpu", task["strategy"], devices, 1, store)


def answer(
    task: dict, config: RunConfig, batch: list[Encoded], members: Members
) -> dict[str, object]:
    """Return gradients, losses and the order of blocks of a group and of one process."""
    from torch import distributed

    from tests.trainer.replica.driving import drawn_weights, gradient, start
    from trainer.run.distributed.group.part import CopiedPart
    from trainer.run.distributed.group.replica import GroupReplica

    model = Path(task["model"])
    single, _ = start(model, config)
    group = GroupReplica(make_setup(task, config, members), members)
    weights = drawn_weights(model, config)
    group.write_trainable(weights)
    found: dict[str, object] = {}
    for name, replica in (("single", single), ("group", group), ("again", group)):
        found[name], result, found[f"{name}_order"] = gradient(replica, batch)
        evaluated = replica.evaluate(batch)
        found[f"{name}_sums"] = [
            *(result.loss_sum, result.weight, result.tokens),
            *(result.ce_sum or 0.0, result.kl_sum or 0.0),
            *(evaluated.loss_sum, evaluated.weight),
            *np.ravel(evaluated.confusion or []),
        ]
    if isinstance(group._part, CopiedPart):
        found["leader_shares"] = group._part._replica.weights.data_ptr() == weights.ctypes.data
    found["send_order"] = group.layout.send_order
    found["few"], _, _ = gradient(group, batch[:1])
    found["few_single"], _, _ = gradient(single, batch[:1])
    found["none"], _, _ = gradient(group, [])
    members.kill_members()
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
