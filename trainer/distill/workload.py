"""The workload of teachers and students, read on the hosts that have their files.

Torch-free; it imports tokenizers, which a laptop that drives a cluster may lack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config.run import RunConfig
from trainer.config.teacher_engines import TEACHER_ENGINES
from trainer.data.document_tokens import ReadDocuments
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.distill.logits.dataset import SHARD_FILE, LogitsFolder
from trainer.distill.logits.heartbeat import TeacherWatch
from trainer.distill.student.from_scratch import fresh_config
from trainer.distill.teacher.windows import SHARD_BYTES, WindowCutter, window_length
from trainer.planning.distillation import Scoring
from trainer.planning.model_config import parse_shape, read_shape
from trainer.planning.shapes import ModelShape
from trainer.planning.teachers import BATCH, Measured
from trainer.system.backends import Backend
from trainer.system.errors import InputError

_MEASURED = 16
"""Shards of the default size to tokenise, in seconds; of a larger corpus an even part is read."""
MOST = 4 << 30
"""Bytes of the largest corpus that is counted before a start: tens of MB a second are read."""


def read_scoring(
    model_dir: Path,
    data: Sequence[Path],
    tokenizer_dir: Path,
    logits: Path,
    max_seq_len: int | None = None,
    shard_bytes: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Scoring:
    """Return what teachers score: as a folder of logits describes it, else as the corpus is.

    Raises:
        InputError: model, tokenizer or corpus cannot be used, or the corpus has more than `MOST`
            bytes.
    """
    shape, folder = read_shape(model_dir), LogitsFolder(logits)
    if folder.is_described:
        there = folder.description
        return Scoring(
            shape=shape,
            tokens=there.tokens,
            windows=there.windows,
            shards=len(there.shards),
            missing=len(folder.list_missing()),
        )
    if sum(map(_file_size, data)) > MOST:
        raise InputError(f"more than {MOST >> 30} GiB of text are not counted before a start")
    length = window_length(model_dir, max_seq_len)
    encoder = Encoder(tokenizer_dir, "accept")  # the teachers themselves refuse
    windows = WindowCutter(ReadDocuments(Documents(data, columns), encoder), length)
    ranges = windows.split_documents(SHARD_BYTES)
    # Without the last one, which may be short and would stand for many.
    part = ranges if len(ranges) <= _MEASURED else ranges[: -1 : -(-len(ranges) // _MEASURED)]
    plans, scale = windows.plan_shards(part), len(ranges) / len(part)
    shards = len(windows.split_documents(shard_bytes) if shard_bytes else ranges)
    return Scoring(
        shape=shape,
        tokens=scale * sum(plan.tokens for plan in plans),
        windows=scale * sum(plan.windows for plan in plans),
        shards=shards,
        missing=shards,
    )


def _file_size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


def student_shape(
    model_dir: Path | None, fresh: str | None, tokenizer_dir: Path | None
) -> ModelShape:
    """Return the shape of a student's model, or of a new one with a tokenizer's vocabulary.

    Raises:
        InputError: the files cannot be used.
    """
    if model_dir is not None:
        return read_shape(model_dir)
    assert fresh is not None
    assert tokenizer_dir is not None
    return parse_shape(fresh_config(fresh, tokenizer_dir), fresh, Path(fresh).stem)


def taught_work(config: RunConfig) -> tuple[float, float]:
    """Return the samples and the tokens of a run whose data is a folder of logits.

    Raises:
        InputError: the folder has no usable description.
    """
    there = LogitsFolder(Path(config.data.train)).description
    samples = config.training.count_samples(there.windows)
    return samples, samples * min(there.tokens / max(there.windows, 1), config.data.max_seq_len)


def read_measured(logits: Path) -> list[Measured]:
    """Return the rates that the teachers of a folder of logits measured, by the kind of device.

    Empty if there is none yet: a rate needs two forwards.

    Raises:
        InputError: the folder has no usable description.
    """
    folder = LogitsFolder(logits)
    there, scheme = folder.description.teacher, folder.description.scheme
    complete = [plan for plan in folder.description.shards if folder.is_complete(plan.number)]
    size = sum((folder.shard_path(plan.number) / SHARD_FILE).stat().st_size for plan in complete)
    tokens = sum(plan.tokens for plan in complete)
    rates: dict[Backend, dict[str, float]] = {}
    facts = TEACHER_ENGINES.get(there.engine)
    places: dict[str, Backend] = {name: name for name in BATCH}
    for status in TeacherWatch(folder).list_teachers():
        state = status.state
        if state.tokens_per_second and state.device is not None:
            place = places.get(state.device.partition(":")[0], "cuda")
            rates.setdefault(place, {})[state.name] = state.tokens_per_second
    return [
        Measured(
            engine=there.engine,
            weights=there.dtype if there.quantization == "none" else there.quantization,
            place=place,
            vocab_size=there.vocab_size,
            rates=by_name,
            bytes_per_token=size / tokens if tokens else None,
            kept=(scheme.kind, scheme.top_k if scheme.kind == "topk" else None),
            bits=_bits_of_types(there.quantization) if facts and facts.reads_gguf else None,
        )
        for place, by_name in rates.items()
    ]


def _bits_of_types(types: str) -> float | None:
    """Return the bits of a weight of the widest of a file's types; None: one is unknown."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        sizes = [GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in types.split("+")]
    except KeyError:
        return None
    return max(8 * size / block for block, size in sizes)
