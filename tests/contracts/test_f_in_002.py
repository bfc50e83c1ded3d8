"""F-IN-002: whatever a host, a member of a run or a shared disk says is plain, or it is refused.

Every field of every message, note and file is derived from the code that writes it, and holds in
turn each odd value. Who reads JSON otherwise: `test_f_in_002_readers.py`.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from launcher.agent import frames
from launcher.errors import LauncherError
from launcher.hosts.local import LocalConnection
from launcher.runs.records.self_reports import read_report
from launcher.transfer.sync import _manifest_sizes
from trainer.checkpoint.reader import RUN_FILE, RunProgress, read_progress
from trainer.checkpoint.reader import SCHEMA as RUN_SCHEMA
from trainer.distill.answers.description import AnswersDescription
from trainer.distill.logits.description import CorpusInfo, Description, ShardPlan
from trainer.distill.logits.heartbeat import TeacherState, _parse_state
from trainer.evaluate.claims import RESULT, Claims
from trainer.evaluate.results import SCHEMA as EVALUATION_SCHEMA
from trainer.evaluate.results import read_evaluations
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.actions import Step
from trainer.exchange.protocol.wire import Frame
from trainer.planning.budget.ledger import SpendRecord, parse_spend
from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.errors import ProtocolError, TrainerError
from trainer.system.storage.atomic_folder import Disk, FolderWriter, read_manifest
from trainer.system.storage.lease_folder import create_lease, lease_path, read_holder
from trainer.system.untrusted_data import LONGEST
from trainer.tracking.metrics import read_metrics
from trainer.tracking.status import SCHEMA as STATUS_SCHEMA
from trainer.tracking.status import Status, read_status

NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "1.7e308", "1" + 400 * "0", str(2**63), "-1")
TEXTS = (r'"a\nrank 0 lost"', r'"\u001b]0;title\u0007"', r'"\u202egnp"', r'"\u2028"', r'"\ud800"')
TEXTS += ('"' + (LONGEST + 1) * "x" + '"',)
ODD = (*NUMBERS, *TEXTS, "null", "[]", "{}", "true")
SIGNED = {
    *("loss_sum", "loss", "learning_rate", "grad_norm", "best", "metric", "accuracy", "figures"),
}
"""Fields that may be negative, or say nothing about it where they are shown."""


# Examples from types


def example(kind: Any) -> Any:
    """Return a value of a type, with something in every optional part."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return example(arguments[0])
    if origin is typing.Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return example(next(each for each in arguments if each is not type(None)))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return [example(each) for each in arguments]
    if origin in (tuple, list) or getattr(origin, "__name__", "") == "Sequence":
        return [example(arguments[0])]
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {"1" if arguments[0] is int else "key": example(arguments[1])}
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return {name: example(each) for name, each in typing.get_type_hints(kind).items()}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: example(hints[name]) for name in kind.model_fields}
    return {int: 3, float: 0.5, str: "text", bool: True, typing.Any: 1}[kind]


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, and of every collection."""
    if path:
        yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))


MARK = "\u0001here\u0001"


def with_odd(tree: Any, path: tuple[Any, ...], odd: str) -> str:
    """Return the JSON text of a tree with something else at one place."""
    copy = json.loads(json.dumps(tree))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = MARK
    return json.dumps(copy).replace(json.dumps(MARK), odd)


def plain_or_why(value: Any, name: str = "") -> str | None:
    """Return what is not plain in what a reader returned."""
    if dataclasses.is_dataclass(value) or isinstance(value, BaseModel):
        value = dict(vars(value))
    if isinstance(value, dict):
        found = (plain_or_why(each, str(key)) for key, each in value.items())
        return next((why for why in found if why), None)
    if isinstance(value, list | tuple):
        return next((why for each in value if (why := plain_or_why(each, name))), None)
    if isinstance(value, str):
        return f"{name}: {len(value)} characters" if len(value) > LONGEST else None
    if isinstance(value, int | float):
        return None if -1e60 <= value <= 1e60 else f"{name}: {value!r:.40}"
    return None


# The exchange


MESSAGES = {kind.__name__: kind for kind in messages.Message.__subclasses__()}
FIELDS = [
    pytest.param(name, path, id=f"{name}.{'.'.join(map(str, path))}")
    for name, kind in MESSAGES.items()
    for path in leaves(example(kind))
]


def read_message(name: str, text: str) -> messages.Message:
    return messages.parse_message(Frame(MESSAGES[name].type, text.encode()))


def test_every_message_of_the_exchange_is_known() -> None:
    assert set(messages.BY_TYPE.values()) == set(MESSAGES.values())
    for name, kind in MESSAGES.items():
        read_message(name, json.dumps(example(kind)))


@pytest.mark.parametrize(("name", "path"), FIELDS)
def test_a_field_of_a_message(name: str, path: tuple[Any, ...]) -> None:
    tree = example(MESSAGES[name])
    for odd in ODD:
        text = with_odd(tree, path, odd)
        message = outcome(partial(read_message, name), text, ProtocolError)
        if isinstance(message, str):
            assert shown_as_it_is(message)
            assert len(message) < 1000
            continue
        # F-DP-003: a run whose losses overflow halts.
        assert plain_or_why(message) is None or path[0] in ("loss", "loss_sum"), odd[:40]
        assert all(map(shown_as_it_is, texts(message))), odd[:40]
        assert odd != "-1" or path[0] in SIGNED


def outcome(read: Callable[[str], Any], text: str, *refusals: type[Exception]) -> Any:
    """Return what a reader returns, or the text of its refusal."""
    try:
        return read(text)
    except refusals as error:
        return str(error)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = list(vars(value).values())
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts(each)


def shown_as_it_is(text: str) -> bool:
    return sanitize_text(text) == text


# Files and notes


@dataclasses.dataclass
class Reader:
    """Something that is read: its content, and how."""

    tree: Any
    """As the code writes it."""
    read: Callable[[str], Any]


def readers(folder: Path) -> dict[str, Reader]:
    """Return every file and note that crosses a disk or the store of a job."""
    from trainer.run.distributed import rank_reports, rank_watchdog
    from trainer.run.distributed.rank_notes import read_note

    def file(name: str, read: Callable[[Path], Any], folder: Path = folder) -> Callable[[str], Any]:
        def written(text: str) -> Any:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
            return read(folder / name)

        return written

    writer = FolderWriter(Disk(), folder, "whole")
    writer.write_file("weights", [b"bytes"])
    whole = writer.publish()
    number = create_lease(folder, 1, "run")
    assert number is not None
    holder = lease_path(folder, 1)
    corpus = CorpusInfo(digest="d", documents=1)
    shards = (ShardPlan(number=0, first_document=0, stop_document=1, windows=1, tokens=1),)

    def described(kind: type[Any]) -> dict[str, Any]:
        hints = typing.get_type_hints(kind)
        names = {field.name for field in dataclasses.fields(kind)} - {"shards", "corpus"}
        parts = {name: example(hints[name]) for name in names}
        parts |= {"corpus": vars(corpus), "shards": [vars(each) for each in shards]}
        return {"schema": kind.schema, **parts}

    claims = folder / "claims"
    (claims / "digest").mkdir(parents=True)
    record = {"schema": EVALUATION_SCHEMA, "digest": "d", "step": 3, "time": 1.5, "tasks": {}}

    def claimed(text: str) -> Any:
        (claims / "digest" / RESULT).write_text(text, encoding="utf-8")
        return Claims(claims, "runner", 10.0).read_states()["digest"]

    return {
        "status.json": Reader(
            {"schema": STATUS_SCHEMA, **example(Status), "updated": 1.5},
            file("status.json", read_status),
        ),
        "status.json, by the launcher": Reader(
            {"schema": STATUS_SCHEMA, **example(Status), "updated": 1.5},
            file("status.json", lambda path: read_report(LocalConnection(), str(path))),
        ),
        "metrics.jsonl": Reader(
            {"kind": "step", "time": 1.5, **example(Step)},
            file("metrics.jsonl", read_metrics),
        ),
        "spend.jsonl": Reader(
            example(SpendRecord), lambda text: parse_spend(f"{text}\n".encode(), "spend.jsonl")
        ),
        RUN_FILE: Reader(
            {"schema": RUN_SCHEMA, **example(RunProgress), "metric": 0.5},
            file(f"step-1/{RUN_FILE}", lambda path: read_progress(path.parent)),
        ),
        "manifest.json": Reader(
            json.loads((whole / "manifest.json").read_bytes()),
            file("whole/manifest.json", lambda path: read_manifest(path.parent)),
        ),
        "manifest.json, by the launcher": Reader(
            json.loads((whole / "manifest.json").read_bytes()),
            file("whole/manifest.json", _manifest_sizes),
        ),
        "dataset.json": Reader(described(Description), Description.from_json),
        "dataset.json, of answers": Reader(
            described(AnswersDescription), AnswersDescription.from_json
        ),
        "a teacher's heartbeat": Reader(
            example(TeacherState), lambda text: _parse_state(text.encode("utf-8"))
        ),
        "a lease's holder": Reader(
            json.loads((holder / "holder.json").read_bytes()),
            file("holder.json", lambda path: read_holder(path.parent), holder),
        ),
        "the result of a claim": Reader(record, claimed),
        "evaluations.jsonl": Reader(record, file("evaluations.jsonl", read_evaluations)),
        "a rank's report": Reader(
            example(rank_reports.RankReport),
            lambda text: read_note(rank_reports.RankReport, text.encode(), "member-1"),
        ),
        "rank 0's note": Reader(
            example(rank_reports._Prepared),
            lambda text: read_note(rank_reports._Prepared, text.encode(), "prepared"),
        ),
        "a rank's end": Reader(
            {"note": ["why", 3]},
            lambda text: read_note(
                rank_watchdog.Reason, text.removeprefix('{"note": ')[:-1].encode(), "failed/1"
            ),
        ),
        "a note on the board": Reader(
            {"note": ["text", 3, 0.5]}, lambda text: read_note(object, text.encode(), "board")
        ),
        "an agent's error": Reader(
            {"kind": "PreflightError", "text": "why", "errno": 3, "path": "/x", "details": ["y"]},
            lambda text: sanitize_text(
                str(frames.to_error(frames.decode_frame(text.encode()), "host"))
            ),
        ),
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return readers(tmp_path_factory.mktemp("disk"))


NAMES = (
    "status.json",
    "status.json, by the launcher",
    "metrics.jsonl",
    "spend.jsonl",
    RUN_FILE,
    "manifest.json",
    "manifest.json, by the launcher",
    "dataset.json",
    "dataset.json, of answers",
    "a teacher's heartbeat",
    "a lease's holder",
    "the result of a claim",
    "evaluations.jsonl",
    "a rank's report",
    "rank 0's note",
    "a rank's end",
    "a note on the board",
    "an agent's error",
)


NEVER_NEGATIVE = (
    "spend.jsonl",
    "manifest.json",
    "dataset.json",
    "dataset.json, of answers",
    "a teacher's heartbeat",
)


def test_every_reader_is_tried(read: dict[str, Reader]) -> None:
    assert tuple(read) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_a_file(name: str, read: dict[str, Reader]) -> None:
    """What is read is plain; or the error has one line, and is of the kinds that people see."""
    reader = read[name]
    assert plain_or_why(reader.read(json.dumps(reader.tree))) is None
    for path in leaves(reader.tree):
        for odd in (*ODD, 5000 * "[" + 5000 * "]"):
            text = with_odd(reader.tree, path, odd)
            found = outcome(reader.read, text, ValueError, TrainerError, LauncherError)
            if isinstance(found, str):
                assert shown_as_it_is(found), (path, odd[:40])
                assert len(found) < 1500, path
                continue
            assert plain_or_why(found) is None, (path, odd[:40])
            assert odd != "-1" or name not in NEVER_NEGATIVE or path[-1] in SIGNED, path
