"""The allowed JSON objects of a line, and the samples that they become.

- `classify`: `{input, label}` or `{text, label}`, see `labels.py`
- `dpo`: `{prompt, chosen, rejected}` and what is published in its place, see `preferences.py`
- `causal-lm`: one of `SHAPES`; an object of none or of two of them is refused, since only a part of
  it would be trained on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainer.data import glaive
from trainer.data.annotation_status import check_accepted
from trainer.data.instructions import read_instruction
from trainer.data.labels import LABEL, TEXTS, LabelColumn, parse_labelled
from trainer.data.preferences import BESIDE, QUESTIONS, read_preference
from trainer.data.sample import Sample, Tree, build_conversation, check_target, read_completion
from trainer.data.turns import (
    TURN_KEYS,
    ChatMessage,
    decode_turns,
    read_conversations,
    read_messages,
)
from trainer.data.values import (
    BadLineError,
    describe_type,
    read_nonempty_text,
    read_objects,
    read_string,
)
from trainer.system.key_table import KeyTable, UnknownKeys


def _read_instruction(tree: Tree, given: str, output: str) -> Sample:
    """Read an instruction, with what it is about in `given`, and its answer."""
    asked = read_instruction(tree, given)
    return build_conversation(
        tree, (*asked, ChatMessage("assistant", read_nonempty_text(tree, output)))
    )


def _read_instances(tree: Tree) -> Sample:
    """Read a seed task of self-instruct."""
    instances = read_objects(tree["instances"], "instances")
    if len(instances) != 1:
        raise BadLineError(
            f"'instances' has {len(instances)} examples, a line is one; write a line for each"
        )
    return _read_instruction({**tree, **instances[0]}, "input", "output")


def _read_glaive(tree: Tree) -> Sample:
    """Read a conversation with function calls as Glaive publishes them."""
    turns = glaive.read_chat(read_nonempty_text(tree, "chat"))
    system, tools = glaive.read_system(read_string(tree, "system") if "system" in tree else "")
    system_turns = [ChatMessage("system", system)] if system else []
    return Sample("", messages=(*system_turns, *turns), tools=tools)


@dataclass(frozen=True)
class Shape:
    """One shape of a line; what else depends on its keys is derived from these rows."""

    keys: tuple[str, ...]
    """Must be there."""
    read: Callable[[Tree], Sample]
    learned: str
    """The part of it that is learned, for the documentation."""
    optional: tuple[str, ...] = ()
    """Used if they are there."""
    idle: tuple[str, ...] = ()
    """Keys of other shapes that may stand beside its own and say nothing more."""
    turns: tuple[str, ...] = ()
    """Keys that may hold turns, also as JSON in a text."""
    answers: tuple[str, ...] = ()
    """Keys of answers: beside them a `label` is a rating, and an `input` alone is not the line."""

    @property
    def spelled(self) -> str:
        """The required keys as errors write them."""
        return "{" + ", ".join(self.keys) + "}"


_WHOLE = ("text", "prompt", "completion", "input", "output", "instruction", "context", "response")

SHAPES = (
    Shape(("text",), lambda tree: Sample(read_nonempty_text(tree, "text")), "all of it"),
    Shape(
        ("messages",),
        lambda tree: build_conversation(tree, read_messages(tree["messages"], "messages")),
        "the assistant's turns",
        optional=BESIDE,
        idle=_WHOLE,
        turns=("messages",),
        answers=("messages",),
    ),
    Shape(
        ("conversations",),
        lambda tree: build_conversation(
            tree, read_conversations(tree["conversations"], "conversations")
        ),
        "the assistant's turns",
        optional=BESIDE,
        idle=_WHOLE,
        turns=("conversations",),
        answers=("conversations",),
    ),
    Shape(
        ("prompt", "completion"),
        read_completion,
        "the completion",
        turns=("prompt", "completion"),
        answers=("completion",),
    ),
    Shape(
        ("instruction", "output"),
        lambda tree: _read_instruction(tree, "input", "output"),
        "the output, and the answers of the history",
        optional=("input", "history", "system", "tools"),
        idle=("text",),  # tatsu-lab/alpaca has the others put together
        answers=("output",),
    ),
    Shape(
        ("instruction", "response"),
        lambda tree: _read_instruction(tree, "context", "response"),
        "the response",
        optional=("context",),
        answers=("response",),
    ),
    Shape(
        ("instruction", "instances"),
        _read_instances,
        "the output of the instance",
        answers=("instances",),
    ),
    Shape(
        ("chat",), _read_glaive, "the assistant's turns", optional=("system",), answers=("chat",)
    ),
    Shape(("input",), lambda tree: Sample(read_nonempty_text(tree, "input")), "all of it"),
)
"""The shapes of a `causal-lm` line."""
PREFERENCE = Shape(
    ("chosen", "rejected"),
    read_preference,
    "which answer is better",
    optional=(*QUESTIONS, "history", *BESIDE),
    turns=("prompt", "conversations", "messages", "chosen", "rejected"),
    answers=("chosen", "rejected"),
)
"""The shape of a `dpo` line."""

KEYS = frozenset(key for shape in SHAPES for key in (*shape.keys, *shape.optional))
TURNS = frozenset(key for shape in (*SHAPES, PREFERENCE) for key in shape.turns)
ANSWERS = frozenset(key for shape in (*SHAPES, PREFERENCE) for key in shape.answers)
"""Keys of lines that hold answers to learn."""
_OTHER_ANSWERS = frozenset(("answer", "answers", "target", "targets", "summary"))
"""Names of answers that no shape has."""

_NO_MEDIA = "is not text, and only text is learned; remove the key, or the line"
_NO_PAIRS = (
    "is a preference: learn the comparison with task dpo, or make it a conversation with the better"
    " answer"
)
_NO_TASKS = (
    "is what an annotation tool exports of a task: export it as a table or JSON-MIN, with the label"
    " in a key of its own, and name that with data.columns.label"
)
_NO_WEIGHT = "weighs a whole line, which counts fully; remove the key, or repeat the line"
LINE_KEYS = KeyTable(
    "a data line",
    used=KEYS,
    harmless=frozenset(
        ("id", "_id", "idx", "index", "uuid", "hash", "source", "dataset", "url", "title", "name")
    )
    | {"timestamp", "created_at", "date", "lang", "language", "license", "split", "category"}
    | {"topic", "tags", "meta", "metadata", "prompt_id", "conversation_id", "is_classification"},
    refused={
        **dict.fromkeys(("chosen", "rejected"), _NO_PAIRS),
        **dict.fromkeys(("image", "images", "videos", "audio", "audios"), _NO_MEDIA),
        **dict.fromkeys(("weight", "sample_weight"), _NO_WEIGHT),
        "annotations": _NO_TASKS,
    },
)
PAIR_KEYS = KeyTable(
    "a preference",
    used=frozenset((*PREFERENCE.keys, *PREFERENCE.optional)),
    harmless=LINE_KEYS.harmless
    | {"score_chosen", "score_rejected", "chosen_score", "rejected_score"},
    refused={key: why for key, why in LINE_KEYS.refused.items() if why != _NO_PAIRS},
)
_PAIR = "is one of two texts; write both into 'input', in the order that the model is to read them"
LABELLED_KEYS = KeyTable(
    "a line with a label",
    used=frozenset((*TEXTS, LABEL)),
    harmless=LINE_KEYS.harmless | {"guid", "uid", "label_text"},
    refused={
        **LINE_KEYS.refused,
        **dict.fromkeys(("sentence1", "sentence2", "question1", "question2", "question"), _PAIR),
        **dict.fromkeys(("premise", "hypothesis", "passage", "context", "text_pair"), _PAIR),
        **dict.fromkeys(("text1", "text2", "text_a", "text_b"), _PAIR),
        "labels": "is not the key of a label; give each line one 'label'",
    },
)


class KeyCounts:
    """Counts the shapes of a file's lines, and the keys of lines and turns that are not used."""

    def __init__(self, labels: LabelColumn | None = None, *, pairs: bool = False) -> None:
        self._labelled, self._pairs = labels is not None, pairs
        self._shapes = Counter[str]()
        self._lines = UnknownKeys(_choose_key_table(labels, pairs))
        self._turns = UnknownKeys(TURN_KEYS)

    def add(self, tree: Any, sample: Sample) -> None:
        """Count those of one line."""
        self._shapes[self._spell_shape(tree)] += 1
        self._lines.add(tree)
        for answer in sample.answers:
            for message in answer.messages:
                self._turns.add(message.more)

    def export_counts(self) -> list[list[Any]]:
        """Return the counts by key and the number of others, of lines and of turns; and shapes."""
        unused = [[dict(part.counts), part.others] for part in (self._lines, self._turns)]
        return [*unused, [dict(self._shapes)]]

    def merge_counts(self, counts: list[list[Any]]) -> None:
        """Add what `export_counts` returned of later lines."""
        *unused, (shapes,) = counts
        for part, (by_key, others) in zip((self._lines, self._turns), unused, strict=True):
            part.merge(by_key, others)
        self._shapes.update(shapes)

    @property
    def shapes(self) -> dict[str, int]:
        """Lines by their keys, the most frequent first."""
        return dict(self._shapes.most_common())

    def _spell_shape(self, tree: Any) -> str:
        if self._pairs:
            return "{chosen, rejected}"
        if self._labelled:
            return f"{{{next(key for key in TEXTS if key in tree)}, label}}"
        return find_shape(tree).spelled

    def report(self) -> list[str]:
        """Return a line for the unused keys of lines, and one for those of turns."""
        return [line for part in (self._lines, self._turns) if (line := part.report())]


def _choose_key_table(labels: LabelColumn | None, pairs: bool) -> KeyTable:
    if pairs:
        return PAIR_KEYS
    return LINE_KEYS if labels is None else LABELLED_KEYS


def parse_sample(
    tree: Any,
    number: int,
    labels: LabelColumn | None = None,
    *,
    where: str = "",
    prompts: bool = False,
    pairs: bool = False,
) -> Sample:
    """Return the JSON value of line `number` as a sample.

    Args:
        labels: reads the labels of a `classify` task; None: a `causal-lm` sample.
        where: names the line in errors of later labels.
        prompts: the lines are continued, not learned: a conversation may lack an answer.
        pairs: the lines are preferences, of a `dpo` task.

    Raises:
        BadLineError: it is not a sample.
    """
    if not isinstance(tree, dict):
        raise BadLineError(f"expected an object, got {describe_type(tree)}")
    check_accepted(tree)
    table = _choose_key_table(labels, pairs)
    if refusal := table.explain_refusal(key for key in tree if tree[key] not in (None, "", [], {})):
        raise BadLineError(refusal)
    if labels is not None:
        return Sample(*parse_labelled(tree, where, labels), line=number)
    if pairs:
        return replace(PREFERENCE.read(_drop_nulls(tree, "")), line=number)
    shape = find_shape(tree)
    sample = shape.read(_drop_nulls(tree))
    if sample.messages and not prompts:
        check_target(shape.keys[-1], sample.messages)
    return replace(sample, line=number)


def _drop_nulls(tree: Tree, absent: str | None = None) -> Tree:
    """Leave out null, which tables have where a line lacks a column; decode turns of a cell.

    Args:
        absent: takes the place of null in what stands beside turns, so that all rows of a table
            with such a column are conversations.
    """
    found = tree | {key: absent for key in BESIDE if key in tree and tree[key] is None}
    return {
        key: decode_turns(value, key) if key in TURNS else value
        for key, value in found.items()
        if value is not None
    }


def find_shape(tree: Tree) -> Shape:
    """Return the shape of an object.

    Keys of other shapes are allowed only beside a conversation, which is complete.

    Raises:
        BadLineError: it has none.
    """
    tree = {key: value for key, value in tree.items() if value is not None}
    answers = ANSWERS | _OTHER_ANSWERS
    found = [key for key in tree if key in KEYS]
    shapes = [shape for shape in SHAPES if tree.keys() >= set(shape.keys)]
    for shape in shapes:
        others = set(found).difference(shape.keys, shape.optional, shape.idle)
        if not others and not (shape.keys == ("input",) and tree.keys() & answers):
            return shape
    named = sorted(tree.keys() & (KEYS | answers))
    given = ", ".join(f"'{key[:40]}'" for key in named or [*tree][:5]) or "none"
    wrong = "match several shapes" if shapes else "match no known shape"
    spelled = ", ".join(shape.spelled for shape in SHAPES)
    raise BadLineError(
        f"its keys ({given}) {wrong}; rename or remove keys, or name them with data.columns, until"
        f" they are one of: {spelled}, {{input, label}}, {{text, label}}"
    )
