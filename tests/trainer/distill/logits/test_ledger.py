"""A duplicate, a gap, a window of another shard: each has its words."""

import pytest

from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder, tiny_windows
from trainer.distill.logits import shard
from trainer.distill.logits.dataset import find_window_faults
from trainer.distill.logits.scores import Window
from trainer.distill.logits.shard_folder import verify_shards
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import Disk

DESCRIPTION = tiny_description(SCHEMES["kept"])
LAST = DESCRIPTION.shards[2]
"""Documents 4 (three windows: 12, 12 and 3 tokens) and 5 (one)."""


def windows():
    return tiny_windows(DESCRIPTION, 2)


def moved(window, document=None, start=None):
    return Window(
        window.document if document is None else document,
        window.start if start is None else start,
        window.tokens,
        window.scores,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [w[0], *w], "document 4: tokens 0 to 12 occur twice"),
        (lambda w: [w[0], *w[2:]], "document 4: tokens 12 to 24 are missing"),
        (lambda w: w[1:], "document 4: tokens 0 to 12 are missing"),
        (lambda w: [w[0], w[2], w[1], w[3]], "document 4: tokens 12 to 24 are missing"),
        (lambda w: [*w[3:], *w[:3]], "document 4 comes after document 5"),
        (lambda w: [*w, moved(w[3], document=6)], "document 6 is not of this shard"),
        (lambda w: [moved(w[0], document=3), *w[1:]], "document 3 is not of this shard"),
        (lambda w: [*w[:3], moved(w[3], start=1)], "document 5: tokens 0 to 1 are missing"),
        (lambda w: w[:3], "3 windows of 27 tokens, expected 4 of 32"),
        (lambda w: [*w[:2], w[3]], "3 windows of 29 tokens, expected 4 of 32"),
        (lambda w: [], "0 windows of 0 tokens, expected 4 of 32"),
    ],
)
def test_the_ledger_finds(change, message):
    assert message in find_window_faults(LAST, change(windows()))


def test_a_shard_whose_bytes_are_right_may_still_lie(tmp_path):
    """A manifest vouches for bytes; the ledger, for what they say."""
    folder = tiny_folder(tmp_path, DESCRIPTION, write=[0])
    twice = windows()
    twice[1] = twice[0]
    folder._publish_shard(LAST, shard.encode_windows(DESCRIPTION, LAST, twice), Disk())
    with pytest.raises(StorageError, match="document 4: tokens 0 to 12 occur twice"):
        folder.verify_shard(2)
    assert [(each.name, each.state) for each in verify_shards(folder)] == [
        ("shard-00000", "whole"),
        ("shard-00001", "missing"),
        ("shard-00002", "damaged"),
    ]
