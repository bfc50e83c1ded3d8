"""What is read from a shard is what was written."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.tiny_logits import (
    SCHEMES,
    VOCABULARY,
    tiny_description,
    tiny_folder,
    tiny_windows,
)
from trainer.distill.logits.dataset import SHARD_FILE, LogitsFolder
from trainer.distill.logits.description import ShardPlan
from trainer.distill.logits.shard import decode_windows, encode_windows
from trainer.distill.logits.shard_folder import verify_shards
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import Disk, FolderWriter


@pytest.mark.parametrize("values", ["float16", "float32"])
@pytest.mark.parametrize("kind", SCHEMES)
def test_windows_come_back(tmp_path, kind, values):
    description = tiny_description(SCHEMES[kind], values)
    folder = tiny_folder(tmp_path, description)
    exact = {"float16": 2**-11, "float32": 0}[values]
    for plan in description.shards:
        read, written = folder.read_shard(plan.number), tiny_windows(description, plan.number)
        assert len(read) == plan.windows == len(written)
        for ours, theirs in zip(read, written, strict=True):
            assert (ours.document, ours.start) == (theirs.document, theirs.start)
            assert ours.tokens.dtype == np.int32
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            for name in ("offsets", "ids", "counts"):
                mine, wanted = getattr(ours.scores, name), getattr(theirs.scores, name)
                assert mine.dtype == wanted.dtype
                np.testing.assert_array_equal(mine, wanted)
            for name in ("logprobs", "tail", "dropped", "entropy"):
                mine, wanted = getattr(ours.scores, name), getattr(theirs.scores, name)
                if wanted is None:
                    assert mine is None
                    continue
                assert mine.dtype == np.float32
                np.testing.assert_allclose(mine, wanted, rtol=exact, atol=exact * 1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", VOCABULARY),
        ("tokens", -1),
        ("ids", VOCABULARY),
        ("ids", -1),
        ("ids", 2**30),
        ("counts", -3),
        ("logprobs", np.nan),
        ("logprobs", np.inf),
        ("logprobs", 3.0),
        ("tail", -9.0),
        ("tail", np.nan),
        ("dropped", 1.5),
        ("entropy", np.inf),
        ("entropy", -1.0),
    ],
)
def test_values_that_no_teacher_gives_are_damage(tmp_path, name, value):
    """Ids of the vocabulary's size and above would be those of the next row."""
    description = tiny_description(SCHEMES["topk"])
    folder, plan = tiny_folder(tmp_path, description), description.shards[1]
    windows = tiny_windows(description, plan.number)
    part = windows[1] if name == "tokens" else windows[1].scores
    getattr(part, name)[-1] = value
    content = encode_windows(description, plan, windows)
    message = f"window 1: {name} has {value}, outside "
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_windows(description, plan, bytes(content))
    replace_shard(folder, plan, content)
    with pytest.raises(StorageError, match=re.escape(message)):
        folder.verify_shard(plan.number)
    states = [verdict.state for verdict in verify_shards(folder)]
    assert states == ["whole", "damaged", "whole"]


def replace_shard(folder: LogitsFolder, plan: ShardPlan, content: memoryview) -> None:
    """Put a file in a shard's place, with a manifest that fits."""
    shutil.rmtree(folder.shard_path(plan.number))
    writer = FolderWriter(Disk(), folder.path, plan.name)
    writer.write_file(SHARD_FILE, [content])
    writer.publish()


def test_a_position_has_the_scores_of_its_scheme(tmp_path):
    description = tiny_description(SCHEMES["full"])
    plan = description.shards[2]
    windows = tiny_windows(description, plan.number)
    windows[0].scores.offsets[1:-1] += 1
    with pytest.raises(ValueError, match="the number of a position's scores"):
        decode_windows(description, plan, bytes(encode_windows(description, plan, windows)))


def test_a_small_file_that_unpacks_to_a_large_one_is_not_unpacked(monkeypatch):
    description = tiny_description(SCHEMES["topk"])
    plan = description.shards[1]
    first, *others = tiny_windows(description, plan.number)
    many = 1_000_000
    scores = replace(
        first.scores,
        offsets=np.zeros(many + 1, np.int64),
        **{name: np.zeros(many, np.float32) for name in ("tail", "dropped", "entropy")},
        **{name: getattr(first.scores, name)[:0] for name in ("ids", "logprobs", "counts")},
    )
    bomb = replace(first, tokens=np.zeros(many, np.int32), scores=scores)
    content = bytes(encode_windows(description, plan, [bomb, *others]))
    assert len(content) < 20_000
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(ValueError, match=r"unpacks to [\d,]+ bytes; its scores have at most"):
        decode_windows(description, plan, content)


def test_a_folder_that_says_it_is_huge_makes_no_bomb_of_a_small_shard(monkeypatch):
    """The plan is the folder's own word, so what the file itself has bounds the memory as well."""
    many = 2_000_000
    description = tiny_description(SCHEMES["topk"])
    plan = replace(description.shards[1], tokens=many, windows=2)
    first, *others = tiny_windows(description, plan.number)
    scores = replace(
        first.scores,
        offsets=np.zeros(many + 1, np.int64),
        **{name: np.zeros(many, np.float32) for name in ("tail", "dropped", "entropy")},
        **{name: getattr(first.scores, name)[:0] for name in ("ids", "logprobs", "counts")},
    )
    bomb = replace(first, tokens=np.zeros(many, np.int32), scores=scores)
    content = bytes(encode_windows(description, plan, [bomb, *others]))
    assert len(content) < 100_000
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(ValueError, match=r"unpacks to more than [\d,]+ bytes"):
        decode_windows(description, plan, content)


def test_columns_whose_pages_hide_their_size_are_refused(monkeypatch):
    """Runs and dictionaries: what they unpack to stands in no header."""
    description = tiny_description(SCHEMES["topk"])
    plan = description.shards[1]
    content = encode_windows(description, plan, tiny_windows(description, plan.number))
    table = pq.read_table(pa.BufferReader(content))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=True)
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(ValueError, match="column document is not written plainly"):
        decode_windows(description, plan, sink.getvalue().to_pybytes())


IN_ONE_THREAD = """
import sys
from pathlib import Path
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_windows
from trainer.distill.logits import shard

description = tiny_description(SCHEMES["topk"])
plan = description.shards[0]
threads = lambda: len(list(Path("/proc/self/task").iterdir()))
before = threads()
content = bytes(shard.encode_windows(description, plan, tiny_windows(description, 0)))
for _ in range(3):
    shard.decode_windows(description, plan, content)
print(threads() - before)
"""


def test_no_thread_outlives_a_read_or_a_write():
    """A thread of pyarrow that lets go of our bytes while Python ends aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_THREAD],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"
