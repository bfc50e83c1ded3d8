"""Make an entry of encoded rows: several processes encode them, this one writes them down.

JSON Lines go to the processes as they are, a piece of the file after another. What has no lines to
cut is read here, and goes as lines of JSON.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from trainer import __version__
from trainer.config.run import Classes, RunConfig, Task
from trainer.data.digests import DIGEST_TYPE, choose_held_out, count_repeated
from trainer.data.encoder import Encoder
from trainer.data.formats import count_lines, read_records
from trainer.data.labels import LABEL, LabelColumn
from trainer.data.measurement import Measurement
from trainer.data.records import MAX_RECORD_BYTES, Problems
from trainer.data.shapes import KeyCounts
from trainer.data.sources import DataFiles
from trainer.data.tokenizer_folder import FILES, MORE_TEMPLATES
from trainer.system import cgroups
from trainer.system.errors import InputError, StorageError, convert_read_errors
from trainer.system.regular_file import open_file
from trainer.system.storage.atomic_folder import make_record
from trainer.system.storage.cache_folder import Files
from trainer.system.storage.progress import report_progress

if TYPE_CHECKING:
    Encoders = subprocess.Popen[bytes]

PIECE_BYTES = 1 << 20
NEVER_CUT = 1 << 30
"""A `max_seq_len` of what is used whole."""
MOST_PROCESSES = 16
"""Processes that encode: more would wait for the one that reads and writes."""
ROWS, PARTS = "rows.arrow", "parts.json"
_FORMAT = 4
"""Changes when an entry of an older Motley cannot be read."""
_MARK = b"\xef\xbb\xbf"
_NOT_DECODED = "..."
"""Takes the place of a column that is not read, of which only the name counts."""
_COLUMNS = {
    **dict.fromkeys(("lengths", "longest", "kept", "label"), np.int32),
    **dict.fromkeys(("unlearned", "lost_text", "conversation"), np.bool_),
}
"""Columns of a process's report on a piece, with a value for each sample."""


@dataclass(frozen=True)
class RowSettings:
    """How the lines of data are read and cut, beside the tokenizer."""

    task: Task
    classes: Classes | None
    columns: Mapping[str, str]
    max_seq_len: int
    prompts: bool = False
    """Whether lines are continued, not learned."""

    @classmethod
    def of_run(cls, config: RunConfig) -> RowSettings:
        """Return those of a run."""
        data = config.data
        return cls(config.task, config.classes, data.columns, data.max_seq_len)


class IrregularError(Exception):
    """Some of the data cannot be encoded, or there is none."""


@dataclass(frozen=True)
class Part:
    """The samples for training, or those for validation, of one file."""

    samples: int
    tokens: int
    longest: int
    powers: list[tuple[int, int]]
    """See `Measurement.powers`."""
    cut: int
    lost: int
    unlearned: int
    conversations: int
    lost_text: int
    remarks: dict[str, int]
    duplicates: int
    ambiguous: int
    """Texts with several labels."""
    classes: list[int]
    """Samples of each class."""

    @property
    def measurement(self) -> Measurement:
        """The tokens of all samples."""
        return Measurement(
            self.samples,
            measured=self.samples,
            longest=self.longest,
            powers=Counter(dict(self.powers)),
            cut=self.cut,
            lost=self.lost,
            unlearned=self.unlearned,
            tokens=self.tokens,
        )


def count_keys(task: Task, classes: Classes | None) -> KeyCounts:
    """Return a counter of the keys that lines of a task have."""
    labels = None if classes is None else LabelColumn(classes)
    return KeyCounts(labels, pairs=task == "dpo")


class RowEntry:
    """Makes an entry: one use.

    Args:
        encoder: None: rows have no tokens.
        data: the digest of the files' bytes.
        fraction: of the different samples is held out.
    """

    def __init__(
        self,
        path: Path,
        files: DataFiles,
        settings: RowSettings,
        encoder: Encoder | None,
        data: str,
        fraction: float,
    ) -> None:
        from trainer.data.row_encoder import EncoderSettings

        self._path, self._files, self._data, self._fraction = path, files.files, data, fraction
        # A pipe has no lines to cut under its own name.
        self._lines = None if files.piped else count_lines(path)
        self._columns, self._classes = dict(settings.columns), settings.classes
        self._settings = EncoderSettings(
            encoder=encoder and encoder.source,
            max_seq_len=settings.max_seq_len,
            columns=self._columns if self._lines is not None else {},
            task=settings.task,
            classes=settings.classes,
            prompts=settings.prompts,
        )
        self._tokenizer = encoder and [encoder.known, encoder.end]
        self._reports: list[dict[str, NDArray[Any]]] = []
        self._remarks: list[tuple[int, str]] = []
        self._keys = count_keys(settings.task, settings.classes)
        self._kinds: set[Any] = set()
        self._count = 0
        self._digests = bytearray()
        self._answers = 2 if settings.task == "dpo" else 1
        self._at_end = ExitStack()
        self._chosen: list[NDArray[np.int64]] = []

    @property
    def key(self) -> str:
        """The digest of all that the entry depends on."""
        import tokenizers

        hasher = blake3()
        facts: list[Any] = [_FORMAT, __version__, tokenizers.__version__, self._data]
        facts += [self._fraction, self._tokenizer]
        settings = asdict(self._settings) | {"encoder": None, "columns": self._columns}
        # Of files that are not JSON Lines the suffix may say what they are.
        facts.append([] if self._lines is not None else [path.name for path in self._files])
        if source := self._settings.encoder:
            folder = Path(source.tokenizer)
            facts += [source.lost_text, source.today]
            named, more = map(folder.joinpath, FILES.used), folder.glob(f"{MORE_TEMPLATES}/*")
            for path in sorted([*named, *more]):
                with suppress(OSError):  # what cannot be read is not used
                    facts.append([str(path.relative_to(folder)), make_record(path).blake3])
        hasher.update(json.dumps([*facts, settings]).encode())
        return hasher.hexdigest()

    def iter_files(self) -> Files:
        """Return the pieces of the entry's files, each made when it is taken."""
        return {
            ROWS: self._iter_rows(),
            PARTS: (self._describe() for _ in range(1)),
            **{f"{n}.bin": self._iter_numbers(n) for n in range(2 if self._fraction else 0)},
        }

    def close(self) -> None:
        """End the processes, also those of a generator that was left where a write failed."""
        self._at_end.close()

    def _iter_numbers(self, part: int) -> Iterator[bytes]:
        yield self._chosen[part].astype("<i8").tobytes()

    def _iter_rows(self) -> Iterator[bytes]:
        import pyarrow as pa

        from trainer.data.row_encoder import SCHEMA

        sink = _WriteBuffer()
        writer = pa.ipc.new_file(pa.PythonFile(sink, "w"), SCHEMA)
        with report_progress(f"encoding {self._path.name}", self._lines) as progress:
            for report, rows in self._iter_encoded():
                columns = {name: np.array(report[name], kind) for name, kind in _COLUMNS.items()}
                self._reports.append(columns)
                self._remarks += [(self._count + row, remark) for row, remark in report["remarks"]]
                self._keys.merge_counts(report["keys"])
                self._kinds.add(report["kind"])
                self._count += len(report["kept"])
                for batch in pa.ipc.open_stream(rows):
                    digests = batch.column("digest").to_numpy(zero_copy_only=False)
                    self._digests += digests[:: self._answers].astype(DIGEST_TYPE).tobytes()
                    writer.write_batch(batch)
                progress.advance(len(report["kept"]))
                yield from sink.take()
        writer.close()
        yield from sink.take()

    def _iter_encoded(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield what processes, at most one a core, answer of the data's pieces, in their order.

        Each process has one piece at a time, so that none waits for the other to be read.
        """
        from trainer.data.row_encoder import receive_message, send_message

        settings = json.dumps(asdict(self._settings)).encode()
        killed = StorageError(f"{self._path}: a process that encodes rows was killed")
        most = min(MOST_PROCESSES, _usable_processors())
        idle: list[Encoders] = []
        busy: deque[Encoders] = deque()

        def receive_answer() -> tuple[dict[str, Any], bytes]:
            process = busy.popleft()
            assert process.stdout is not None
            report = receive_message(process.stdout)
            if report is None:
                raise killed
            tree = json.loads(report)
            if "irregular" in tree:
                raise IrregularError
            rows = receive_message(process.stdout)
            if rows is None:
                raise killed
            idle.append(process)
            return tree, rows

        for piece in self._iter_pieces():
            if not idle and len(busy) == most:
                yield receive_answer()
            is_new = not idle
            process = self._start_encoder() if is_new else idle.pop()
            assert process.stdin is not None
            try:
                if is_new:
                    send_message(process.stdin, settings)
                send_message(process.stdin, piece)
            except OSError:
                raise killed from None
            busy.append(process)
        while busy:
            yield receive_answer()

    def _start_encoder(self) -> Encoders:
        command = [sys.executable, "-P", "-m", "trainer.data.row_encoder"]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._at_end.callback(_kill_process, process)
        return process

    def _iter_pieces(self) -> Iterator[bytes]:
        """Yield the lines of the data, about a MiB at a time.

        Raises:
            InputError: its bytes are others than those of the key.
            IrregularError: a part of it cannot be read.
        """
        hasher = blake3()
        yield from (
            self._iter_file_pieces(hasher)
            if self._lines is not None
            else self._iter_record_pieces()
        )
        if self._lines is None:
            for path in self._files:
                with convert_read_errors(path, InputError), open_file(path) as file:
                    while piece := file.read(PIECE_BYTES):
                        hasher.update(piece)
                hasher.update(b"\0")
        if hasher.hexdigest() != self._data:
            raise InputError(f"{self._path}: was changed while it was read; read it again")

    def _iter_file_pieces(self, hasher: blake3) -> Iterator[bytes]:
        for path in self._files:
            with convert_read_errors(path, InputError), open_file(path) as file:
                first = True
                while piece := file.read(PIECE_BYTES):
                    if not piece.endswith(b"\n"):
                        piece += (rest := file.readline(MAX_RECORD_BYTES))
                        if len(rest) == MAX_RECORD_BYTES:
                            raise IrregularError
                    hasher.update(piece)
                    yield piece.removeprefix(_MARK) if first else piece
                    first = False
            hasher.update(b"\0")

    def _iter_record_pieces(self) -> Iterator[bytes]:
        """Yield the records of a format without lines, each as a line of JSON."""
        labels = None if self._classes is None else LabelColumn(self._classes)
        problems, held, size = Problems(), list[bytes](), 0
        try:
            for record in read_records(self._path, problems, self._columns):
                held.append(json.dumps(_as_json(record.tree, labels), default=_refuse).encode())
                size += len(held[-1])
                if size >= PIECE_BYTES:
                    yield b"\n".join(held)
                    held, size = [], 0
            problems.raise_if_any()
        except InputError:
            raise IrregularError from None
        if held:
            yield b"\n".join(held)

    def _describe(self) -> bytes:
        """Return what the parts hold, once all rows are encoded.

        Raises:
            IrregularError: a part has nothing to learn from, nothing can be held out, or labels
                are of several kinds.
        """
        digests = np.frombuffer(self._digests, dtype=DIGEST_TYPE)
        everything = np.arange(len(digests))
        self._chosen = [everything]
        if self._fraction:
            held = choose_held_out(digests, self._fraction)
            if held is None:
                raise IrregularError
            self._chosen = [everything[~held], everything[held]]
        parts = [self._summarize_part(chosen, digests) for chosen in self._chosen]
        kinds = self._kinds - {None}
        if any(part.unlearned == part.samples for part in parts) or len(kinds) > 1:
            raise IrregularError
        tree = {"parts": [asdict(part) for part in parts], "keys": self._keys.export_counts()}
        return json.dumps(tree | {"labels": next(iter(kinds), None)}).encode()

    def _summarize_part(self, chosen: NDArray[np.int64], digests: NDArray[np.bytes_]) -> Part:
        def get_column(name: str) -> NDArray[Any]:
            return np.concatenate([each[name] for each in self._reports])[chosen]

        lengths, longest, labels = get_column("lengths"), get_column("longest"), get_column("label")
        mine = np.isin(np.array([row for row, _ in self._remarks], np.int64), chosen)
        remarks = Counter(t for (_, t), here in zip(self._remarks, mine, strict=True) if here)
        classes = np.bincount(labels[labels >= 0])
        duplicates, ambiguous = count_repeated(digests[chosen], labels)
        powers = np.ceil(np.log2(np.maximum(longest, 1))).astype(np.int64)
        return Part(
            samples=len(chosen),
            tokens=int(lengths.sum(dtype=np.int64)),
            longest=int(longest.max(initial=0)),
            powers=[(1 << power, count) for power, count in Counter(powers.tolist()).items()],
            cut=int((longest > self._settings.max_seq_len).sum()),
            lost=int((lengths - get_column("kept")).sum(dtype=np.int64)),
            unlearned=int(get_column("unlearned").sum()),
            conversations=int(get_column("conversation").sum()),
            lost_text=int(get_column("lost_text").sum()),
            remarks=dict(remarks),
            duplicates=duplicates,
            ambiguous=ambiguous,
            classes=classes.tolist(),
        )


def _as_json(tree: Any, labels: LabelColumn | None) -> Any:
    """Return a record without what JSON has no value for."""
    if not isinstance(tree, dict):
        return tree
    found: Mapping[str, Any] = tree
    plain = {name: _NOT_DECODED if value is ... else value for name, value in found.items()}
    if labels is not None and LABEL in plain:
        plain[LABEL] = labels.as_named(plain[LABEL])
    return plain


def _refuse(_: object) -> Any:
    raise IrregularError


def _usable_processors() -> int:
    if not hasattr(os, "sched_getaffinity"):  # Linux alone has it
        return os.cpu_count() or 1
    return cgroups.count_processors(len(os.sched_getaffinity(0)))


def _kill_process(process: Encoders) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):  # what is left for a killed process
            if stream is not None:
                stream.close()
    process.wait()


class _WriteBuffer(io.RawIOBase):
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
