"""A deterministic generator of meetings: a transcript, and the minutes of what stands at its end.

The issues (`settings/`) are written by hand, with reports, questions, options that have arguments
for and against them, and tasks. A conversation (`scenes.py`) goes through some of one setting's
issues. It decides, votes or postpones, gives tasks away, and takes some of it back later: a
decision is replaced or withdrawn, a task changes hands or is put off. What is said is tracked as
it is said, so the minutes follow from the transcript. Validation has its own issues, phrases and
instructions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from meetings.conversation import Conversation, IssueOutcome, capital, listed
from meetings.issue import Issue, MeetingSetting, Option, held_out, part
from meetings.minutes import Meeting, Minutes
from meetings.scenes import amend, discuss, reconsider
from meetings.texts import MONTHS, NAMES, SETTINGS

Split = Literal["train", "validation"]


def generate(split: Split, count: int, seed: int) -> Iterator[Meeting]:
    """Yield `count` different meetings."""
    rng = random.Random(f"meetings/{split}/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        meeting = _meeting(rng, split == "validation")
        if meeting.request not in seen:
            seen.add(meeting.request)
            yield meeting


def _meeting(rng: random.Random, validation: bool) -> Meeting:
    setting = rng.choice(SETTINGS)
    names = rng.sample(NAMES, rng.randint(3, min(6, len(setting.roles))))
    own = [i for number, i in enumerate(setting.issues) if held_out(number) == validation]
    issues = [_drawn(issue, rng) for issue in rng.sample(own, rng.randint(1, len(own)))]
    talk = Conversation(rng, validation, names)
    if rng.random() < 0.3:
        talk.digress()
    talk.speak(talk.chair, "open", topics=listed([issue.topic for issue in issues]))
    for issue in issues:
        discuss(talk, issue)
        _look_back(talk)
        if rng.random() < 0.2:
            talk.digress()
    items = [each.item() for outcome in talk.outcomes for each in outcome.assignments]
    if items and rng.random() < 0.25:
        said = [f"{i.owner}, {i.task}{f', by {i.due}' if i.due else ''}" for i in items]
        talk.speak(talk.chair, "recap", items="; ".join(said) + ".")
    talk.speak(talk.chair, "close")
    decisions = [capital(outcome.chosen.do) for outcome in talk.outcomes if outcome.chosen]
    minutes = Minutes(_summary(talk), [f"{text}." for text in decisions], items)
    transcript = f"{_head(rng, setting, names, validation)}\n\n{_lines(talk)}"
    instruction = talk.phrase("instructions")
    pieces = (transcript, instruction) if rng.random() < 0.6 else (instruction, transcript)
    return Meeting("\n\n".join(pieces), minutes)


def _look_back(talk: Conversation) -> None:
    """Change something that was settled under an earlier point, in some meetings."""
    earlier = talk.outcomes[:-1]
    decided = [outcome for outcome in earlier if outcome.chosen and not outcome.revised]
    if decided and talk.rng.random() < 0.35:
        reconsider(talk, talk.rng.choice(decided))
    tasks = [each for outcome in earlier for each in outcome.assignments]
    if tasks and talk.rng.random() < 0.2:
        amend(talk, talk.rng.choice(tasks))


def _drawn(issue: Issue, rng: random.Random) -> Issue:
    """Return an issue with its numbers."""
    values = {name: str(rng.randrange(*bounds)) for name, bounds in issue.numbers.items()}

    def text(template: str) -> str:
        return template.format(**values)

    return replace(
        issue,
        background=text(issue.background),
        report=text(issue.report),
        asked=tuple((text(question), text(answer)) for question, answer in issue.asked),
        options=tuple(
            Option(text(o.do), text(o.pro), text(o.con), tuple(map(text, o.tasks)))
            for o in issue.options
        ),
        tasks=tuple(map(text, issue.tasks)),
    )


def _head(rng: random.Random, setting: MeetingSetting, names: list[str], validation: bool) -> str:
    title = rng.choice(part(setting.titles, validation))
    roles = [setting.roles[0], *rng.sample(setting.roles[1:], len(names) - 1)]
    there = [f"{name} ({role})" for name, role in zip(names, roles, strict=True)]
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    return rng.choice(
        (
            f"{title}, {date}\nPresent: {', '.join(there)}",
            f"{title}\nDate: {date}\nParticipants: {'; '.join(there)}",
            f"Transcript: {title} ({date})\n" + "\n".join(f"* {each}" for each in there),
        )
    )


def _lines(talk: Conversation) -> str:
    """Return the turns as lines: plain, or with the time at which each began."""
    if talk.rng.random() < 0.6:
        return "\n".join(f"{name}: {text}" for name, text in talk.turns)
    lines: list[str] = []
    second = 0
    for name, text in talk.turns:
        lines.append(f"[{second // 60:02}:{second % 60:02}] {name}: {text}")
        second += 1 + round(len(text.split()) / 2.5) + talk.rng.randint(0, 3)
    return "\n".join(lines)


def _summary(talk: Conversation) -> str:
    topics = [outcome.issue.topic for outcome in talk.outcomes]
    about = [talk.phrase("about", topics=listed(topics))] if len(topics) > 1 else []
    return " ".join(about + [_outcome(talk, outcome) for outcome in talk.outcomes])


def _outcome(talk: Conversation, outcome: IssueOutcome) -> str:
    """Return a sentence or two about one issue."""
    values = {"topic": outcome.issue.topic, "background": outcome.issue.background}
    if outcome.revised is not None:
        values |= {"old": outcome.revised.do, "oldcon": outcome.revised.con}
    if outcome.chosen is None:
        kind = "sum_revoked" if outcome.revised else "sum_open"
        return talk.phrase(kind, **values)
    values |= {"do": outcome.chosen.do, "pro": outcome.chosen.pro, "con": outcome.chosen.con}
    if outcome.revised is not None:
        return talk.phrase("sum_revised", **values)
    if outcome.rejected is not None:
        return talk.phrase("sum_contested", other=outcome.rejected.do, **values)
    return talk.phrase("sum_decided", **values)
