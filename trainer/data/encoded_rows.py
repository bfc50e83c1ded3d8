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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import RunConfig, Task
from trainer.data.data_file import ConversationCheck, DataFile
from trainer.data.digests import DIGEST_TYPE, Digests
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.formats import is_json_lines, read_records
from trainer.data.labels import Kind, LabelColumn
from trainer.data.measurement import Measurement
from trainer.data.records import Problems
from trainer.data.row_entry import (
    PARTS,
    ROWS,
    IrregularError,
    Part,
    RowEntry,
    RowSettings,
    count_keys,
)
from trainer.data.sample import Sample
from trainer.data.samples import check_columns, hash_files, read_file
from trainer.data.shapes import parse_sample
from trainer.data.sources import find_data
from trainer.data.tokens import Dataset, Encoded
from trainer.system.errors import StorageError
from trainer.system.storage.cache_folder import ensure_entry

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
        batch, row = self._find_batch(index)
        found = [self._answer(batch, row + n) for n in range(self._answers)]
        return found[0] if len(found) == 1 else replace(found[0], rejected=found[1])

    def _find_batch(self, index: int) -> tuple[Any, int]:
        """Return the batch and the first row there of a sample, whose rows are in one batch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = self.line_number(index) * self._answers
        number = int(np.searchsorted(self._begins, row, side="right")) - 1
        return self._batches[number], row - int(self._begins[number])

    def read_prompt(self, index: int) -> Sample:
        """Return the sample of a prompt."""
        batch, row = self._find_batch(index)
        tree = json.loads(batch.column("record")[row].as_py())
        return parse_sample(tree, index + 1, prompts=True)

    def line_number(self, index: int) -> int:
        """Return the number in the file of a sample."""
        return index if self.chosen is None else int(self.chosen[index])

    def iter_column(self, name: str) -> Iterator[NDArray[Any]]:
        """Yield a column of the whole file, batch by batch."""
        for batch in self._batches:
            yield batch.column(name).to_numpy(zero_copy_only=False)

    def iter_digests(self) -> Digests:
        """Yield the digests of the samples, batch by batch."""
        begin = 0
        for every in self.iter_column("digest"):
            column = every[:: self._answers]
            found = column.astype(DIGEST_TYPE)
            if self.chosen is not None:
                bounds = np.searchsorted(self.chosen, (begin, begin + len(column)))
                found = found[self.chosen[slice(*bounds)] - begin]
            begin += len(column)
            yield found

    @staticmethod
    def _answer(batch: Any, row: int) -> Encoded:
        ids, learned, label = (column[row] for column in batch.columns[:3])
        input_ids = ids.values.to_numpy()
        if label.is_valid:
            return Encoded(input_ids, label.as_py())
        targets = learned.values.to_numpy(zero_copy_only=False)
        labels = np.where(targets, input_ids, np.int32(IGNORED))
        labels.flags.writeable = False
        return Encoded(input_ids, labels)


@dataclass(frozen=True)
class EncodedFile:
    """The rows of a data file; see `DataFile`."""

    path: Path
    unused: list[str]
    labels: Kind | None
    shapes: Mapping[str, int]
    rows: EncodedRows
    held_out: EncodedRows | None
    settings: RowSettings

    def __len__(self) -> int:
        return len(self.rows)

    def hold_out(self, fraction: float) -> tuple[EncodedFile, EncodedFile]:
        """Return the training samples and the held-out ones, as the entry has them."""
        assert self.held_out is not None, f"opened without the fraction {fraction}"
        held_out = replace(self, rows=self.held_out, held_out=None, unused=[])
        return replace(self, held_out=None), held_out

    def open_dataset(self, encoder: Encoder, task: Task, max_seq_len: int) -> Dataset:  # noqa: ARG002 - as DataFile has it
        """Return the samples as a replica reads them; checked when they were encoded."""
        return self.rows

    def measure_tokens(
        self,
        encoder: Encoder,  # noqa: ARG002 - as DataFile has it
        max_seq_len: int,  # noqa: ARG002 - as DataFile has it
        budget: int | None = None,  # noqa: ARG002 - as DataFile has it
    ) -> Measurement:
        """Return the tokens, which were counted when they were encoded."""
        return self.rows.part.measurement

    def check_conversations(self, encoder: Encoder) -> ConversationCheck:  # noqa: ARG002 - as DataFile has it
        """Return what was found when they were encoded."""
        part = self.rows.part
        return ConversationCheck(part.conversations, part.lost_text, part.remarks)

    def count_classes(self) -> Mapping[int, int]:
        """Return the samples of each class that has some."""
        return dict(enumerate(self.rows.part.classes))

    def count_repeated(self) -> tuple[int, int]:
        """Return how many samples are as one before, and how many texts have several labels."""
        return self.rows.part.duplicates, self.rows.part.ambiguous

    def sample_digests(self) -> Digests:
        """Return the digests of the samples, batch by batch."""
        return self.rows.iter_digests()

    def choose_examples(self, count: int) -> list[Sample]:
        """Return about so many samples, evenly spread; the file is read up to the last one."""
        wanted = range(0, len(self.rows), max(1, len(self.rows) // max(count, 1)))[:count]
        numbers = {self.rows.line_number(index) for index in wanted}
        settings = self.settings
        labels = None if settings.classes is None else LabelColumn(settings.classes)
        found: list[Sample] = []
        records = read_records(self.path, Problems(), settings.columns)
        for number, record in enumerate(records):
            if len(found) == len(numbers):
                break
            if number in numbers:
                sample = parse_sample(
                    record.tree, record.number, labels, pairs=settings.task == "dpo"
                )
                found.append(replace(sample, source=record.source))
        return found


def read_data(
    path: str | None, config: RunConfig, encoder: Encoder | None, fraction: float = 0.0
) -> DataFile | None:
    """Return the rows of large data, the samples of other data, None where no data is named.

    Args:
        encoder: None: the rows have no tokens.
        fraction: of the different samples that rows hold out.

    Raises:
        DataError, InputError: see `read_file`.
    """
    if not path:
        return None
    data = Path(path)
    return open_encoded(data, RowSettings.of_run(config), encoder, fraction) or read_file(
        data, config.task, config.classes, config.data.columns
    )


def open_encoded(
    path: Path,
    settings: RowSettings,
    encoder: Encoder | None,
    fraction: float = 0.0,
    *,
    any_size: bool = False,
) -> EncodedFile | None:
    """Return the encoded rows of a data file, which are made if they are not cached.

    None for little data, an environment without pyarrow, a cache that cannot be written, and data
    of which a part cannot be read or encoded.

    Args:
        encoder: None: the rows have no tokens.
        fraction: of the different samples is held out.
        any_size: whether little data is encoded, too.

    Raises:
        InputError: there is no data, or it was changed meanwhile.
    """
    check_columns(settings.columns)
    files = find_data(path)
    # A coordinator's environment may have no pyarrow.
    if not (any_size or is_large(files.files)) or find_spec("pyarrow") is None:
        return None
    entry = RowEntry(path, files, settings, encoder, hash_files([path]).hexdigest(), fraction)
    try:
        name = f"rows-{_NOT_IN_NAMES.sub('_', path.stem)[:40]}"
        folder = ensure_entry(name, entry.key, entry.iter_files)
    except IrregularError:
        return None
    except StorageError as error:
        log.warning("%s; the rows of %s are not cached", error, path)
        return None
    finally:
        entry.close()
    if note := files.describe(path):
        log.info("%s", note)
    tree = json.loads((folder / PARTS).read_text())
    parts = [Part(**part) for part in tree["parts"]]
    chosen: list[Any] = [None, None]
    if fraction:
        chosen = [np.memmap(folder / f"{n}.bin", dtype="<i8", mode="r") for n in range(2)]
    answers = 2 if settings.task == "dpo" else 1
    rows = [EncodedRows(folder, *each, answers) for each in zip(parts, chosen, strict=False)]
    keys = count_keys(settings.task, settings.classes)
    keys.merge_counts(tree["keys"])
    held_out = rows[1] if fraction else None
    return EncodedFile(
        path, keys.report(), tree["labels"], keys.shapes, rows[0], held_out, settings
    )


def is_large(files: Iterable[Path]) -> bool:
    """Return whether data is worth an entry, by the sizes of its files."""
    size = 0
    with suppress(OSError):  # its reader reports it
        for each in files:
            size += each.stat().st_size * (1 if is_json_lines(each) else _PACKED)
    return size >= LEAST_BYTES
