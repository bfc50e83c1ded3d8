"""Which pages of a model's file stay in a process that has loaded it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.replica.torch.loader import StoredWeights

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_converted_leaves_no_pages_beside_what_stays_mapped(tmp_path: Path) -> None:
    """As in a model from a GGUF file: its norms are fp32, its matrices are not."""
    file = tmp_path / "model.safetensors"
    matrix = torch.ones(4 * MIB, 2, dtype=torch.bfloat16)
    save_file({"norm.weight": torch.ones(8), "table.weight": matrix}, file)
    stored = StoredWeights(tmp_path, torch.float32, torch.device("cpu"))
    norm, table = stored.tensor("norm.weight"), stored.tensor("table.weight")
    assert torch.equal(table, matrix.float())
    assert norm.sum() == 8
    assert _mapped(file) < MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_fits_stays_in_the_file(tmp_path: Path) -> None:
    """Processes of one host share those pages."""
    file = tmp_path / "model.safetensors"
    save_file({"table.weight": torch.ones(4 * MIB)}, file)
    table = StoredWeights(tmp_path, torch.float32, torch.device("cpu")).tensor("table.weight")
    assert table.sum() == 4 * MIB
    assert _mapped(file) >= 16 * MIB


def _mapped(file: Path) -> int:
    """Return the bytes of a file that this process has mapped and in memory."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = re.findall(rf" {re.escape(str(file))}\n(?:\w+: .*\n)*?Rss: +(\d+) kB", maps)
    return 1024 * sum(map(int, found))
