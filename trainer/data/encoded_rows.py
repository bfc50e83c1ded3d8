"""The encoded rows of data, made once a host and mapped: memory does not grow with them.

An entry of the cache holds them as one Arrow file, found by the digest of the data and of all that
the tokens depend on. Processes of this host's cores encode them; the first process of a run to
come makes the entry, the others wait for it. Where an entry cannot be made, the data is read into
memory as small data is: that reader finds and names the first bad lines.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import RunConfig
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.formats import is_json_lines
from trainer.data.labels import Kind
from trainer.data.row_entry import (
    DIGEST_TYPE,
    DIGESTS,
    PARTS,
    ROWS,
    IrregularError,
    Part,
    RowEntry,
    unused_keys,
)
from trainer.data.samples import SampleFile, check_columns, hash_files, read_file
from trainer.data.sources import DataFiles, find_data
from trainer.data.tokens import Dataset, Encoded, make_dataset
from trainer.system.errors import StorageError
from trainer.system.storage.cache_folder import cached

log = logging.getLogger(__name__)

LEAST_BYTES = 4 << 20
"""Data of fewer bytes is read and encoded by each process, in seconds."""
_PACKED = 4
"""Times the bytes of a file that is not text, about what it unpacks to."""
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


class EncodedRows(Dataset):
    """Some rows of an entry, in the file's order.

    Args:
        chosen: their numbers; None: all.
        answers: the rows of a sample, two of a preference.
    """

    def __init__(
        self, folder: Path, part: Part, chosen: NDArray[np.int64] | None, answers: int
    ) -> None:
        import pyarrow as pa

        self.part, self.chosen = part, chosen
        self._answers = answers
        reader = pa.ipc.open_file(pa.memory_map(str(folder / ROWS)))
        self._batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
        self._begins = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return self.part.samples

    def __getitem__(self, index: int) -> Encoded:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = (index if self.chosen is None else int(self.chosen[index])) * self._answers
        number = int(np.searchsorted(self._begins, row, side="right")) - 1
        row -= int(self._begins[number])  # the answers of a sample are in one batch
        found = [self._answer(self._batches[number], row + n) for n in range(self._answers)]
        return found[0] if len(found) == 1 else replace(found[0], rejected=found[1])

    @staticmethod
    def _answer(batch: Any, row: int) -> Encoded:
        ids, learned, label = (column[row] for column in batch.columns)
        input_ids = ids.values.to_numpy()
        if label.is_valid:
            return Encoded(input_ids, label.as_py())
        targets = learned.values.to_numpy(zero_copy_only=False)
        labels = np.where(targets, input_ids, np.int32(IGNORED))
        labels.flags.writeable = False
        return Encoded(input_ids, labels)


@dataclass(frozen=True)
class EncodedFile:
    """The rows of a data file; the counterpart of a `SampleFile`."""

    path: Path
    unused: list[str]
    """As of a `SampleFile`."""
    labels: Kind | None
    """What the labels of a classification are."""
    rows: EncodedRows
    held_out: EncodedRows | None
    folder: Path

    def hold_out(self) -> tuple[EncodedFile, EncodedFile | None]:
        """Return the rows for training and the held-out ones, if some are."""
        if self.held_out is None:
            return self, None
        held_out = replace(self, rows=self.held_out, held_out=None, unused=[])
        return replace(self, held_out=None), held_out

    def digests(self) -> NDArray[np.bytes_]:
        """Return the first bytes of the digest of each sample."""
        found = np.fromfile(self.folder / DIGESTS, dtype=DIGEST_TYPE)
        return found if self.rows.chosen is None else found[self.rows.chosen]


DataFile = SampleFile | EncodedFile


def read_data(
    path: str | None, config: RunConfig, model_dir: Path, fraction: float = 0.0
) -> DataFile | None:
    """Return the rows of large data, the samples of other data, None where no data is named.

    Args:
        fraction: of the different samples that rows hold out.

    Raises:
        DataError, InputError: see `read_file`.
    """
    if not path:
        return None
    data = Path(path)
    return open_encoded(data, config, model_dir, fraction) or read_file(
        data, config.task, config.classes, config.data.columns
    )


def open_rows(file: DataFile, encoder: Encoder, config: RunConfig) -> Dataset:
    """Return a data file as a replica reads it; see `make_dataset`."""
    if isinstance(file, EncodedFile):
        return file.rows
    return make_dataset(file, encoder, config.task, config.data.max_seq_len)


def open_encoded(
    path: Path, config: RunConfig, model_dir: Path, fraction: float = 0.0
) -> EncodedFile | None:
    """Return the encoded rows of a data file, which are made if they are not cached.

    None for little data, an environment without pyarrow, a cache that cannot be written, and data
    of which a part cannot be read or encoded.

    Args:
        fraction: of the different samples is held out.

    Raises:
        InputError: there is no data, or it was changed meanwhile.
    """
    check_columns(config.data.columns)
    files = find_data(path)
    # A coordinator's environment may have no pyarrow.
    if not _is_large(files) or find_spec("pyarrow") is None:
        return None
    entry = RowEntry(path, files, config, model_dir, hash_files([path]).hexdigest(), fraction)
    try:
        name = f"rows-{_NOT_IN_NAMES.sub('_', path.stem)[:40]}"
        folder = cached(name, entry.key, entry.files)
    except IrregularError:
        return None
    except StorageError as error:
        log.warning("%s; the rows of %s are not cached", error, path)
        return None
    finally:
        entry.end()
    if note := files.note(path):
        log.info("%s", note)
    tree = json.loads((folder / PARTS).read_text())
    parts = [Part(**part) for part in tree["parts"]]
    chosen: list[Any] = [None, None]
    if fraction:
        chosen = [np.memmap(folder / f"{n}.bin", dtype="<i8", mode="r") for n in range(2)]
    answers = 2 if config.task == "dpo" else 1
    rows = [EncodedRows(folder, *each, answers) for each in zip(parts, chosen, strict=False)]
    unused = unused_keys(config.task, config.classes)
    unused.merge(tree["unused"])
    held_out = rows[1] if fraction else None
    return EncodedFile(path, unused.report(), tree["labels"], rows[0], held_out, folder)


def _is_large(files: DataFiles) -> bool:
    """Return whether data is worth an entry, by the sizes of its files."""
    size = 0
    with suppress(OSError):  # its reader reports it
        for each in files.files:
            size += each.stat().st_size * (1 if is_json_lines(each) else _PACKED)
    return size >= LEAST_BYTES
