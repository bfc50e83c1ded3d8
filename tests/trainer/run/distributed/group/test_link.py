"""The connection of a replica group's leader and a member, cut anywhere in a message."""

from __future__ import annotations

import os
from multiprocessing.connection import Pipe

import numpy as np

from trainer.run.distributed.group.link import GroupLink

ARRAYS = {"weights": np.arange(6, dtype=np.float32)}


def test_what_is_whole_is_received_and_no_wait_is_for_the_rest() -> None:
    """A member may be stopped in the middle of a message: its leader has to notice that."""
    ours, theirs = Pipe()
    arriving, end = Pipe()
    with ours, theirs, arriving, end:
        sender, receiver = GroupLink(ours), GroupLink(end)
        sender.send({"command": "train"}, ARRAYS)
        sender.send({"heartbeat": True})
        data = os.read(theirs.fileno(), 1 << 20)
        found = []
        for at in range(len(data)):
            os.write(arriving.fileno(), data[at : at + 1])
            whole = receiver.receive_available()
            assert whole is not None
            found += [(at, message) for message in whole]
        (first, train), (last, beat) = found
        assert first < last == len(data) - 1
        assert (train.body, beat.body, beat.arrays) == (
            {"command": "train"},
            {"heartbeat": True},
            {},
        )
        np.testing.assert_array_equal(train.arrays["weights"], ARRAYS["weights"])
        arriving.close()
        assert receiver.receive_available() is None


def test_messages_that_arrive_at_once_are_received_in_turn() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        sender, receiver = GroupLink(ours), GroupLink(theirs)
        for number in range(3):
            sender.send({"number": number})
        ours.close()
        found = [receiver.receive() for _ in range(4)]
    assert [message and message.body for message in found] == [
        *({"number": number} for number in range(3)),
        None,
    ]
