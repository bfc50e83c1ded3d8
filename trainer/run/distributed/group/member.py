"""A member of a replica group: executes the leader's commands, independent of the run."""

from __future__ import annotations

import logging
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainer.model.layout import GradientLayout, build_layout
from trainer.run.distributed.group.link import GroupLink, GroupMessage, unpack_samples
from trainer.run.distributed.group.processes import HEARTBEAT_INTERVAL
from trainer.run.distributed.group.setup import GroupSetup, compute_identity
from trainer.run.distributed.rank_watchdog import is_peer_failure
from trainer.system.errors import DoesNotFitError, TrainerError, first_line, is_out_of_memory
from trainer.system.process.heartbeat import start_heartbeat

if TYPE_CHECKING:
    from trainer.run.distributed.group.part import GroupPart

log = logging.getLogger(__name__)


def run_member(link: GroupLink, rank: int) -> int:
    """Do as the leader says until it closes the link, and return the exit code."""
    start_heartbeat(lambda: link.send({"heartbeat": True}), HEARTBEAT_INTERVAL)
    try:
        return _serve_leader(link, rank)
    except Exception as error:
        known = as_user_error(error)
        collective = is_peer_failure(error)
        if known is None and not collective:
            traceback.print_exc()
        code = 1 if known is None else known.exit_code
        text = f"{type(error).__name__}: {first_line(error)}" if known is None else str(known)
        link.send({"error": text, "code": code, "collective": collective})
        return code


def as_user_error(error: Exception) -> TrainerError | None:
    """Return an error whose message a user can act on; None if it is another one."""
    if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
        return DoesNotFitError(
            "the group's model or a micro-batch does not fit; lower training.micro_batch_size or"
            " data.max_seq_len, or use more devices"
        )
    return error if isinstance(error, TrainerError) else None


def _serve_leader(link: GroupLink, rank: int) -> int:
    part: tuple[GroupPart, GradientLayout] | None = None
    while (message := link.receive()) is not None:
        if message.body["command"] == "open":
            del message.body["command"]
            part = _open_part(link, GroupSetup.from_json(message.body), rank)
        else:
            assert part is not None
            _execute_command(link, *part, message)
        link.send({"done": True})
    return 0


def _open_part(link: GroupLink, setup: GroupSetup, rank: int) -> tuple[GroupPart, GradientLayout]:
    link.send(compute_identity(setup))  # before the first collective, which may not fit
    from trainer.run.distributed.group.part import open_part

    part = open_part(setup, rank)
    log.info("rank %d of the group of %d on %s", rank, len(setup.devices), setup.devices[rank])
    return part, build_layout(setup.model_dir, setup.config)


def _execute_command(
    link: GroupLink, part: GroupPart, layout: GradientLayout, message: GroupMessage
) -> None:
    match message.body:
        case {"command": "train", "alpha": alpha}:
            link.send(asdict(part.train(unpack_samples(message.arrays), None, alpha)))
        case {"command": "evaluate"}:
            link.send(asdict(part.evaluate(unpack_samples(message.arrays))))
        case {"command": "weights"}:
            from trainer.run.distributed.group.part import broadcast_weights

            part.write_trainable(broadcast_weights(layout, None))
        case _:
            raise AssertionError(message.body)
