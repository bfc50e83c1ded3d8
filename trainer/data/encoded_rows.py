"""The encoded rows of large data, made once a host and mapped: memory does not grow with them.

An entry of the cache holds them as one Arrow file, found by the digest of the data and of all that
the tokens depend on. Processes of this host's cores encode them; the first process of a run to
come makes the entry, the others wait for it. Where an entry cannot be made, the data is read into
memory as small data is: that reader finds and names the first bad lines.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from trainer import __version__
from trainer.config.run import RunConfig
from trainer.data.encoder import IGNORED
from trainer.data.formats import count_lines
from trainer.data.measurement import Measurement
from trainer.data.records import MAX_RECORD_BYTES
from trainer.data.sample import Sample
from trainer.data.samples import check_columns, hash_files
from trainer.data.shapes import UnusedKeys
from trainer.data.sources import find_data
from trainer.data.tokenizer_folder import MORE_TEMPLATES
from trainer.data.tokens import Dataset, Encoded
from trainer.system import cgroups
from trainer.system.errors import InputError, StorageError, readable
from trainer.system.regular_file import open_file
from trainer.system.storage.atomic_folder import record_of
from trainer.system.storage.cache_folder import Files, cached
from trainer.system.storage.progress import reported

if TYPE_CHECKING:
    Encoders = subprocess.Popen[bytes]

log = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""Data of fewer bytes is read and encoded by each process, in seconds."""
PIECE_BYTES = 1 << 20
MOST_PROCESSES = 16
"""Processes that encode: more would wait for the one that reads and writes."""
_FORMAT = 1
"""Changes when an entry of an older Motley cannot be read."""
_DIGEST = np.dtype("S16")
"""Of a sample's digest, a part that is different for different samples."""
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt")
_NOT_IN_NAMES = re.compile(r"[^\w.-]")
_MARK = b"\xef\xbb\xbf"
_COLUMNS = ("lengths", "kept", "unlearned", "lost_text", "conversation")
_ROWS, _PARTS, _DIGESTS = "rows.arrow", "parts.json", "digests.bin"


class _IrregularError(Exception):
    """Some lines cannot be encoded, or there are none."""


@dataclass(frozen=True)
class Part:
    """The samples for training, or those for validation, of one file."""

    samples: int
    tokens: int
    longest: int
    cut: int
    lost: int
    unlearned: int
    conversations: int
    lost_text: int
    markup: dict[str, int]
    duplicates: int

    @property
    def measurement(self) -> Measurement:
        """The tokens of all samples."""
        return Measurement(
            self.samples,
            lengths=[self.longest],
            cut=self.cut,
            lost=self.lost,
            unlearned=self.unlearned,
            tokens=self.tokens,
            whole=True,
        )


class EncodedRows(Dataset):
    """Some rows of an entry, in the file's order.

    Args:
        chosen: their numbers; None: all.
    """

    def __init__(self, folder: Path, part: Part, chosen: NDArray[np.int64] | None) -> None:
        import pyarrow as pa

        self.part, self.chosen = part, chosen
        reader = pa.ipc.open_file(pa.memory_map(str(folder / _ROWS)))
        self._batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
        self._begins = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return self.part.samples

    def __getitem__(self, index: int) -> Encoded:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = index if self.chosen is None else int(self.chosen[index])
        number = int(np.searchsorted(self._begins, row, side="right")) - 1
        row -= int(self._begins[number])
        ids, learned = (column[row].values for column in self._batches[number].columns)
        input_ids = ids.to_numpy()
        labels = np.where(learned.to_numpy(zero_copy_only=False), input_ids, np.int32(IGNORED))
        labels.flags.writeable = False
        return Encoded(input_ids, labels)


@dataclass(frozen=True)
class EncodedFile:
    """The rows of a run's data file."""

    path: Path
    unused: list[str]
    """As of a `SampleFile`."""
    train: EncodedRows
    held_out: EncodedRows | None
    folder: Path

    def count_shared(self, validation: Sequence[Sample]) -> int:
        """Return how many of these samples have the text of a row for training."""
        own = np.fromfile(self.folder / _DIGESTS, dtype=_DIGEST)
        own = own if self.train.chosen is None else own[self.train.chosen]
        found = np.array([sample.digest()[: _DIGEST.itemsize] for sample in validation], _DIGEST)
        return int(np.isin(found, own).sum())


def open_encoded(path: Path, config: RunConfig, model_dir: Path) -> EncodedFile | None:
    """Return the encoded rows of a training file, which are made if they are not cached.

    None for little data, data that is no JSON Lines of texts to learn, an environment without
    pyarrow, a cache that cannot be written, and lines of which one cannot be encoded.

    Raises:
        InputError: the data cannot be read, or was changed meanwhile.
    """
    check_columns(config.data.columns)
    files = find_data(path)
    if config.task != "causal-lm" or files.piped:
        return None
    try:
        if sum(each.stat().st_size for each in files.files) < LEAST_BYTES:
            return None
    except OSError:
        return None  # its reader reports it
    # A coordinator's environment may have no pyarrow.
    if find_spec("pyarrow") is None or (lines := count_lines(path)) is None:
        return None
    data, fraction = hash_files([path]).hexdigest(), config.data.validation_fraction
    build = _Build(path, files.files, config, model_dir, data, lines)
    try:
        folder = cached(f"rows-{_NOT_IN_NAMES.sub('_', path.stem)[:40]}", build.key, build.files)
    except _IrregularError:
        return None
    except StorageError as error:
        log.warning("%s; the rows of %s are not cached", error, path)
        return None
    finally:
        build.end()
    if note := files.note(path):
        log.info("%s", note)
    tree = json.loads((folder / _PARTS).read_text())
    parts = [Part(**part) for part in tree["parts"]]
    chosen: list[Any] = [None, None]
    if fraction:
        chosen = [np.memmap(folder / f"{n}.bin", dtype="<i8", mode="r") for n in range(2)]
    rows = [EncodedRows(folder, *each) for each in zip(parts, chosen, strict=False)]
    unused = UnusedKeys()
    unused.merge(tree["unused"])
    held_out = rows[1] if fraction else None
    return EncodedFile(path, unused.report(), rows[0], held_out, folder)


class _Build:
    """Makes an entry: one use."""

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        config: RunConfig,
        model_dir: Path,
        data: str,
        lines: int,
    ) -> None:
        from trainer.data.row_encoder import EncoderSettings

        settings = config.data
        self._path, self._files, self._data, self._lines = path, files, data, lines
        self._fraction = settings.validation_fraction
        self._settings = EncoderSettings(
            model=str(model_dir),
            lost_text=settings.lost_text,
            date=settings.date,
            max_seq_len=settings.max_seq_len,
            columns=dict(settings.columns),
        )
        self._reports: list[dict[str, NDArray[Any]]] = []
        self._markup: list[tuple[int, str]] = []
        self._unused = UnusedKeys()
        self._count = 0
        self._digests = bytearray()
        self._at_end = ExitStack()
        self._chosen: list[NDArray[np.int64]] = []

    @property
    def key(self) -> str:
        """The digest of all that the entry depends on."""
        import tokenizers

        hasher = blake3()
        facts = [_FORMAT, __version__, tokenizers.__version__, self._data, self._fraction]
        hasher.update(json.dumps([*facts, asdict(self._settings) | {"model": ""}]).encode())
        folder = Path(self._settings.model)
        for path in sorted([*folder.glob("*"), *folder.glob(f"{MORE_TEMPLATES}/*")]):
            if path.suffix in _OF_TOKENIZERS:
                with suppress(OSError):  # what cannot be read is not used
                    name = str(path.relative_to(folder))
                    hasher.update(json.dumps([name, record_of(path).blake3]).encode())
        return hasher.hexdigest()

    def files(self) -> Files:
        """Return the pieces of the entry's files, each made when it is taken."""
        return {
            _ROWS: self._rows(),
            _DIGESTS: (bytes(self._digests) for _ in range(1)),
            _PARTS: (self._describe() for _ in range(1)),
            **{f"{n}.bin": self._numbers(n) for n in range(2 if self._fraction else 0)},
        }

    def end(self) -> None:
        """End the processes, also those of a generator that was left where a write failed."""
        self._at_end.close()

    def _numbers(self, part: int) -> Iterator[bytes]:
        yield self._chosen[part].astype("<i8").tobytes()

    def _rows(self) -> Iterator[bytes]:
        import pyarrow as pa

        from trainer.data.row_encoder import SCHEMA

        sink = _Pieces()
        writer = pa.ipc.new_file(pa.PythonFile(sink, "w"), SCHEMA)
        with reported(f"encoding {self._path.name}", self._lines) as progress:
            for report, digests, rows in self._encoded():
                self._reports.append({name: np.array(report[name]) for name in _COLUMNS})
                self._markup += [(self._count + row, token) for row, token in report["markup"]]
                self._unused.merge(report["unused"])
                self._count += len(report["kept"])
                self._digests += digests
                for batch in pa.ipc.open_stream(rows):
                    writer.write_batch(batch)
                progress.advance(len(report["kept"]))
                yield from sink.take()
        writer.close()
        yield from sink.take()

    def _encoded(self) -> Iterator[tuple[dict[str, Any], bytes, bytes]]:
        """Yield what processes, one for each core, answer of the data's pieces, in their order.

        Each process has one piece at a time, so that none waits for the other to be read.
        """
        from trainer.data.row_encoder import receive, send

        settings = json.dumps(asdict(self._settings)).encode()
        command = [sys.executable, "-P", "-m", "trainer.data.row_encoder"]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        killed = StorageError(f"{self._path}: a process that encodes rows was killed")
        idle: list[Encoders] = []
        for _ in range(min(MOST_PROCESSES, _usable_processors())):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            self._at_end.callback(_end, process)
            idle.append(process)
        busy: deque[Encoders] = deque()

        def answer() -> tuple[dict[str, Any], bytes, bytes]:
            process = busy.popleft()
            assert process.stdout is not None
            report = receive(process.stdout)
            if report is None:
                raise killed
            tree = json.loads(report)
            if "irregular" in tree:
                raise _IrregularError
            digests, rows = receive(process.stdout), receive(process.stdout)
            if digests is None or rows is None:
                raise killed
            idle.append(process)
            return tree, digests, rows

        fresh = set(map(id, idle))
        for piece in self._pieces():
            if not idle:
                yield answer()
            process = idle.pop(0)
            assert process.stdin is not None
            try:
                if id(process) in fresh:
                    fresh.remove(id(process))
                    send(process.stdin, settings)
                send(process.stdin, piece)
            except OSError:
                raise killed from None
            busy.append(process)
        while busy:
            yield answer()

    def _pieces(self) -> Iterator[bytes]:
        """Yield the lines of the data, about a MiB at a time.

        Raises:
            InputError: its bytes are others than those of the key.
            _IrregularError: a line is too long.
        """
        hasher = blake3()
        for path in self._files:
            with readable(path, InputError), open_file(path) as file:
                first = True
                while piece := file.read(PIECE_BYTES):
                    if not piece.endswith(b"\n"):
                        piece += (rest := file.readline(MAX_RECORD_BYTES))
                        if len(rest) == MAX_RECORD_BYTES:
                            raise _IrregularError
                    hasher.update(piece)
                    yield piece.removeprefix(_MARK) if first else piece
                    first = False
            hasher.update(b"\0")
        if hasher.hexdigest() != self._data:
            raise InputError(f"{self._path}: was changed while it was read; read it again")

    def _describe(self) -> bytes:
        """Return what the parts hold, once all rows are encoded.

        Raises:
            _IrregularError: a part has nothing to learn from, or nothing can be held out.
        """
        digests = np.frombuffer(self._digests, dtype=_DIGEST)
        different, same = np.unique(digests, return_inverse=True)
        everything = np.arange(len(digests))
        self._chosen = [everything]
        if self._fraction:
            if len(different) < 2:
                raise _IrregularError
            # As `hold_out` does: digests are random, so is their order.
            held = same < max(1, round(self._fraction * len(different)))
            self._chosen = [everything[~held], everything[held]]
        parts = [self._part(chosen, same) for chosen in self._chosen]
        if any(part.unlearned == part.samples for part in parts):
            raise _IrregularError
        tree = {"parts": [asdict(part) for part in parts], "unused": self._unused.counts()}
        return json.dumps(tree).encode()

    def _part(self, chosen: NDArray[np.int64], same: NDArray[np.int64]) -> Part:
        def column(name: str) -> NDArray[Any]:
            return np.concatenate([each[name] for each in self._reports])[chosen]

        lengths, kept = column("lengths"), column("kept")
        mine = np.isin(np.array([row for row, _ in self._markup], np.int64), chosen)
        markup = Counter(t for (_, t), here in zip(self._markup, mine, strict=True) if here)
        return Part(
            samples=len(chosen),
            tokens=int(lengths.sum()),
            longest=int(lengths.max(initial=0)),
            cut=int((lengths > self._settings.max_seq_len).sum()),
            lost=int((lengths - kept).sum()),
            unlearned=int(column("unlearned").sum()),
            conversations=int(column("conversation").sum()),
            lost_text=int(column("lost_text").sum()),
            markup=dict(markup),
            duplicates=len(chosen) - len(np.unique(same[chosen])),
        )


def _usable_processors() -> int:
    if not hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return os.cpu_count() or 1
    return cgroups.processors(len(os.sched_getaffinity(0)))


def _end(process: Encoders) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):  # what is left for a killed process
            if stream is not None:
                stream.close()
    process.wait()


class _Pieces(io.RawIOBase):
    """A file that hands on what is written to it."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._written.append(bytes(data))
        return len(self._written[-1])

    def take(self) -> list[bytes]:
        """Return what was written since the last call."""
        taken, self._written = self._written, []
        return taken
