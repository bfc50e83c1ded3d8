import json
import random
import re
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from trainer.commands.generate_data import generate_data
from trainer.data.meetings.generator import generate
from trainer.data.meetings.issue import part
from trainer.data.meetings.minutes import ActionItem, Meeting, Minutes, find_action_items
from trainer.data.meetings.texts import ASIDES, NAMES, PHRASES, SETTINGS
from trainer.data.samples import read_samples


@pytest.fixture(scope="module")
def train() -> list[Meeting]:
    return list(generate("train", 300, seed=0))


@pytest.fixture(scope="module")
def validation() -> list[Meeting]:
    return list(generate("validation", 150, seed=0))


TURN = re.compile(rf"^(?:\[\d\d:\d\d\] )?({'|'.join(NAMES)}): (.+)$")


def turns(meeting: Meeting) -> list[tuple[str, str]]:
    found = map(TURN.match, meeting.request.splitlines())
    return [(match[1], match[2]) for match in found if match]


def test_equal_seeds_give_equal_meetings_and_others_other_ones(train):
    assert list(generate("train", 30, seed=0)) == train[:30]
    assert list(generate("train", 30, seed=1)) != train[:30]
    assert len({meeting.request for meeting in train}) == len(train)


def test_lengths_speakers_and_outcomes_vary(train):
    words = [len(meeting.request.split()) for meeting in train]
    assert min(words) < 250
    assert max(words) > 1000
    assert {len({name for name, _ in turns(meeting)}) for meeting in train} >= {3, 4, 5, 6}
    decisions = [len(meeting.minutes.decisions) for meeting in train]
    assert {0, 1, 2, 3, 4} <= set(decisions)
    items = [len(meeting.minutes.action_items) for meeting in train]
    assert {0, 1, 3, 6, 9} <= set(items)
    changed = sum("first" in m.minutes.summary or "back" in m.minutes.summary for m in train)
    assert 0.2 < changed / len(train) < 0.8


def test_everything_in_the_minutes_was_said(train, validation):
    for meeting in (*train, *validation):
        said = " ".join(text for _, text in turns(meeting)).casefold()
        speakers = {name for name, _ in turns(meeting)}
        for decision in meeting.minutes.decisions:
            assert decision.rstrip(".").casefold() in said
        for item in meeting.minutes.action_items:
            assert item.owner in speakers
            assert item.task.casefold() in said
            assert item.due is None or item.due.casefold() in said


def test_what_was_dropped_is_no_action_item(train):
    dropped = [
        re.compile(re.escape(text.split("{task}")[0].split("{name}")[-1].strip()))
        for text in part(PHRASES["drop"], validation=False)
    ]
    count = 0
    for meeting in train:
        for _, text in turns(meeting):
            for pattern in dropped:
                for match in pattern.finditer(text):
                    after = text[match.end() :].strip()
                    left = [i for i in meeting.minutes.action_items if after.startswith(i.task)]
                    count += 1
                    assert not left
    assert count > 20


def masked(text: str) -> set[str]:
    """Return the sentences of a text, without what is drawn: names, numbers, dates."""
    text = re.sub(rf"\b({'|'.join(NAMES)})\b", "NAME", text)
    text = re.sub(r"\d+", "0", text)
    return {sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+", text)}


def test_no_text_of_validation_occurs_in_training(train, validation):
    """Neither the templates, nor any sentence that was made of them and says something."""
    for name, texts in {**PHRASES, "asides": [exchange[0] for exchange in ASIDES]}.items():
        assert len(set(texts)) == len(texts), name
        assert part(texts, True), name
    training = set().union(*(masked(text) for m in train for _, text in turns(m)))
    held = set().union(*(masked(text) for m in validation for _, text in turns(m)))
    held_out = {text for text in held if len(text.split()) > 3}
    assert len(held_out) > 300
    assert not held_out & training
    topics = [[issue.topic for issue in setting.issues] for setting in SETTINGS]
    assert len({topic for each in topics for topic in each}) == sum(map(len, topics))
    instructions = [{m.request.split("\n\n")[0], m.request.split("\n\n")[-1]} for m in validation]
    seen = {piece for m in train for piece in m.request.split("\n\n")}
    assert not seen & set().union(*instructions)


def test_every_phrase_can_be_said():
    """Each phrase is complete once its braces are filled, whatever is filled in."""
    values = dict.fromkeys(
        (
            "topics",
            "topic",
            "name",
            "other",
            "do",
            "pro",
            "con",
            "task",
            "due",
            "later",
            "yes",
            "no",
            "items",
            "background",
            "old",
            "oldcon",
        ),
        "x",
    )
    known = {**values, **{name.capitalize(): "X" for name in values}}
    for texts in PHRASES.values():
        for text in texts:
            assert "{" not in text.format(**known)
            assert text.format(**known)[-1] in ".?x"
    for setting in SETTINGS:
        assert len(setting.roles) >= 6
        for issue in setting.issues:
            assert len(issue.options) == 3
            texts = [issue.background, issue.report, *issue.tasks]
            texts += [text for pair in issue.asked for text in pair]
            for option in issue.options:
                texts += [option.do, option.pro, option.con, *option.tasks]
                assert option.tasks
                assert option.do[0].islower()
                assert not option.pro.endswith(".")
                assert not option.con.endswith(".")
            drawn = {name: str(random.Random(0).randrange(*b)) for name, b in issue.numbers.items()}
            used = set(re.findall(r"\{(\w+)\}", " ".join(texts)))
            assert used == set(drawn), issue.topic


def test_minutes_are_read_back(train):
    for meeting in train[:50]:
        assert find_action_items(str(meeting.minutes)) == list(meeting.minutes.action_items)
    assert find_action_items(str(Minutes("x", [], []))) == []


def test_action_items_as_models_write_them():
    text = "\n".join(
        (
            "- Tom: not below the heading",
            "**Action Items**",
            "",
            "1. Tom: book it (by Friday)",
            "* Ann: call: twice (no date)",
            "nonsense",
            "- no colon",
            "• Eve: wait",
            "Decisions:",
            "- Bob: no longer",
        )
    )
    assert find_action_items(text) == [
        ActionItem("Tom", "book it", "Friday"),
        ActionItem("Ann", "call: twice"),
        ActionItem("Eve", "wait"),
    ]


def test_the_files_are_conversations_with_a_reference(tmp_path, train):
    arguments = ["meetings", "--count", "12", "--validation-count", "5", "-o"]
    result = CliRunner().invoke(generate_data, [*arguments, str(tmp_path / "data")])
    assert result.exit_code == 0, result.output
    assert "12 training and 5 validation meetings" in result.output
    path = tmp_path / "data" / "train.jsonl"
    samples = read_samples(path, "causal-lm")
    assert [sample.messages[0].content for sample in samples] == [m.request for m in train[:12]]
    assert [sample.messages[1].content for sample in samples] == [
        str(m.minutes) for m in train[:12]
    ]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["action_items"] for line in lines] == [
        [asdict(item) for item in m.minutes.action_items] for m in train[:12]
    ]
    assert len(read_samples(tmp_path / "data" / "validation.jsonl", "causal-lm")) == 5
