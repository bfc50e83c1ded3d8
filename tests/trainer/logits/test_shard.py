"""What is read from a shard is what was written."""

import numpy as np
import pytest
from tiny_logits import SCHEMES, tiny_description, tiny_folder, tiny_windows


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
