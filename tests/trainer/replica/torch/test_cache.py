"""A decoder with a cache computes what it computes without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.replica.torch.parallel.models import write_drawn_model


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_token_at_a_time(tmp_path: Path, family: str) -> None:
    """Rows of different lengths, the shorter one with something behind it."""
    import torch

    from trainer.replica.torch.cache import KVCache
    from trainer.replica.torch.loader import load_frozen

    folder = write_drawn_model(tmp_path / "model", family)
    backbone = load_frozen(folder, torch.float32, torch.device("cpu")).model
    rows = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = [backbone(row[None]).last_hidden_state[0] for row in rows]
        cache = KVCache(9)
        lengths = torch.tensor([5, 2])
        prompts = backbone(rows[:, :5], cache=cache).last_hidden_state
        torch.testing.assert_close(prompts[0], whole[0][:5])
        torch.testing.assert_close(prompts[1, :2], whole[1][:2])
        for step in range(4):
            places = (lengths + step)[:, None]
            new = backbone(rows.gather(1, places), places, cache=cache).last_hidden_state
            for row, place in enumerate(places[:, 0].tolist()):
                torch.testing.assert_close(new[row, 0], whole[row][place])
    with pytest.raises(AssertionError, match="10 tokens in 9 slots"):
        backbone(rows[:, :1], lengths[:, None], cache=cache)
