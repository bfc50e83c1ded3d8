"""llama.cpp computes a published file as transformers computes its dequantised weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.teacher.admission import LIMIT, admit_engine
from trainer.distill.teacher.gguf_engine import open_gguf
from trainer.model.gguf.source import stored_types
from trainer.replica.backend import Compute

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        find_spec("xllamacpp") is None, reason="the extra gguf-engine is not installed"
    ),
]


def test_a_published_file_is_admitted(smollm2: Path) -> None:
    assert stored_types(smollm2) == "Q4_1+Q8_0"
    engine = open_gguf(smollm2, Compute("cpu", threads=1))
    text = (ROOT / "README.md").read_text()
    ids = np.array(load_tokenizer(smollm2).encode(text).ids[:128], np.int32)
    kl = admit_engine(engine, "gguf", smollm2, [ids[:100], ids[100:]])
    assert kl is not None
    print(f"{kl:.3g} nats")
    assert 0 < kl < LIMIT
