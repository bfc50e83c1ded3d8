"""The samples of a data file as a replica reads them."""

from __future__ import annotations

from pathlib import Path

from trainer.config.run import Classes, Task
from trainer.data.encoder import Encoder
from trainer.data.samples import read_file
from trainer.data.tokens import Dataset


def load_dataset(
    path: Path, tokenizer_dir: Path, task: Task, classes: Classes | None, max_seq_len: int
) -> Dataset:
    """Read and check a whole data file; see `SampleFile.open_dataset`."""
    file = read_file(path, task, classes)
    return file.open_dataset(Encoder(tokenizer_dir), task, max_seq_len)
