"""What is read from a shard is what was written."""

import subprocess
import sys

import numpy as np
import pytest

from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder, tiny_windows


@pytest.mark.parametrize("values", ["float16", "float32"])
@pytest.mark.parametrize("kind", SCHEMES)
def test_windows_come_back(tmp_path, kind, values):
    description = tiny_description(SCHEMES[kind], values)
    folder = tiny_folder(tmp_path, description)
    exact = {"float16": 2**-11, "float32": 0}[values]
    for plan in description.shards:
        read, written = folder.read(plan.number), tiny_windows(description, plan.number)
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


IN_ONE_THREAD = """
import sys
from pathlib import Path
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_windows
from trainer.distill.logits import shard

description = tiny_description(SCHEMES["topk"])
plan = description.shards[0]
threads = lambda: len(list(Path("/proc/self/task").iterdir()))
before = threads()
content = bytes(shard.encode(description, plan, tiny_windows(description, 0)))
for _ in range(3):
    shard.decode(description, plan, content)
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
