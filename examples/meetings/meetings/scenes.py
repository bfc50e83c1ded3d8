"""How a meeting treats an issue: report, arguments, a decision, tasks, second thoughts."""

from __future__ import annotations

from meetings.conversation import Conversation, IssueOutcome, TaskAssignment
from meetings.issue import Issue, Option
from meetings.texts import DUES

_NUMBERS = ("none", "one", "two", "three", "four", "five", "six")


def discuss(talk: Conversation, issue: Issue) -> None:
    """Take one issue from its report to its outcome."""
    outcome = IssueOutcome(issue)
    presenter = talk.someone(talk.chair)
    if talk.outcomes:
        talk.speak(talk.chair, "next", topic=issue.topic, name=presenter)
    else:
        talk.speak(talk.chair, "first", name=presenter)
    talk.outcomes.append(outcome)
    _report(talk, issue, presenter)
    first, second, third = talk.rng.sample(issue.options, 3)
    proposer = talk.someone(talk.chair)
    _argue(talk, proposer, "propose", first)
    shape = talk.rng.choices(("agreed", "contested", "changed", "open"), (3, 5, 2, 2))[0]
    if shape == "agreed":
        _agreement(talk, proposer)
        _decide(talk, outcome, first)
    elif shape == "changed":  # decided, and changed before the next point
        _decide(talk, outcome, first)
        critic = talk.someone(talk.chair, proposer)
        talk.speak(critic, "object", con=first.con)
        _replace(talk, outcome, second, critic)
    else:
        critic = talk.someone(proposer, talk.chair)
        talk.speak(critic, "object", con=first.con)
        if talk.rng.random() < 0.4:
            talk.speak(proposer, "defend")
        rival = talk.someone(proposer)
        _argue(talk, rival, "counter", second)
        if talk.rng.random() < 0.5:
            talk.speak(talk.someone(rival), "object", con=second.con)
        if talk.rng.random() < 0.25:
            _argue(talk, talk.someone(talk.turns[-1][0], rival, proposer), "counter", third)
        if shape == "open":
            talk.speak(talk.chair, "postpone", topic=issue.topic)
        else:
            sides = [(first, proposer), (second, rival)]
            talk.rng.shuffle(sides)
            (chosen, winner), (outcome.rejected, loser) = sides
            friend = talk.someone(winner, loser, talk.turns[-1][0])
            if friend not in (winner, talk.turns[-1][0]):
                talk.speak(friend, "favour", name=winner, do=chosen.do)
            _decide(talk, outcome, chosen)
    _share_out(talk, outcome)


def reconsider(talk: Conversation, outcome: IssueOutcome) -> None:
    """Come back to a decision and replace it, or withdraw it."""
    old = outcome.chosen
    assert old is not None
    critic = talk.someone(talk.chair)
    talk.speak(critic, "return", topic=outcome.issue.topic, con=old.con)
    talk.nod(0.4)
    if talk.rng.random() < 0.6:
        other = talk.rng.choice([option for option in outcome.issue.options if option != old])
        _replace(talk, outcome, other, talk.someone(talk.chair))
    else:
        talk.speak(talk.chair, "revoke", topic=outcome.issue.topic)
        outcome.chosen, outcome.revised = None, old
    for assignment in [each for each in outcome.assignments if each.option == old]:
        outcome.assignments.remove(assignment)
        talk.speak(talk.chair, "drop", name=assignment.owner, task=assignment.task)
    if outcome.chosen is not None:
        for task in outcome.chosen.tasks:
            _assign(talk, outcome, task, outcome.chosen)


def amend(talk: Conversation, assignment: TaskAssignment) -> None:
    """Reassign a task, or postpone its date."""
    owner = assignment.owner
    due = assignment.due
    if due is not None and due < len(DUES) - 1 and talk.rng.random() < 0.5:
        later = _later(talk, due)
        dates = {"due": DUES[due], "later": DUES[later]}
        talk.speak(owner, "delay", task=assignment.task, **dates)
        talk.speak(talk.someone(owner), "grant", later=DUES[later])
        assignment.due = later
    else:
        assignment.owner = talk.someone(owner)
        talk.speak(owner, "pass_on", task=assignment.task, other=assignment.owner)
        talk.speak(assignment.owner, "take_over")


def _report(talk: Conversation, issue: Issue, presenter: str) -> None:
    """Let a participant report the issue, and answer questions."""
    talk.say(presenter, issue.report)
    talk.nod(0.4)
    for question, answer in talk.rng.sample(issue.asked, talk.rng.randint(0, len(issue.asked))):
        talk.say(talk.someone(presenter), question)
        talk.say(presenter, answer)
        talk.nod(0.2)


def _argue(talk: Conversation, name: str, kind: str, option: Option) -> None:
    talk.speak(name, kind, do=option.do, pro=option.pro)


def _agreement(talk: Conversation, proposer: str) -> None:
    others = [name for name in talk.names if name not in (talk.chair, proposer)]
    for name in talk.rng.sample(others, talk.rng.randint(0, min(2, len(others)))):
        talk.speak(name, "agree")


def _decide(talk: Conversation, outcome: IssueOutcome, option: Option) -> None:
    outcome.chosen = option
    count = len(talk.names)
    if count > 3 and talk.rng.random() < 0.2:
        yes = talk.rng.randint(count // 2 + 1, count - 1)
        counts = {"yes": _NUMBERS[yes], "no": _NUMBERS[count - yes]}
        talk.speak(talk.chair, "vote", do=option.do, **counts)
    else:
        talk.speak(talk.chair, "decide", do=option.do)
        if talk.rng.random() < 0.5:
            talk.speak(talk.someone(talk.chair), "agree")


def _replace(talk: Conversation, outcome: IssueOutcome, option: Option, name: str) -> None:
    outcome.revised, outcome.chosen = outcome.chosen, option
    _argue(talk, name, "rethink", option)
    if talk.rng.random() < 0.4:
        talk.speak(talk.someone(name, talk.chair), "agree")
    talk.speak(talk.chair, "change", do=option.do)


def _share_out(talk: Conversation, outcome: IssueOutcome) -> None:
    """Give away the tasks of a decision, and some that are needed in any case."""
    rng = talk.rng
    for task in outcome.chosen.tasks if outcome.chosen else ():
        _assign(talk, outcome, task, outcome.chosen)
    for task in outcome.issue.tasks:
        if rng.random() < (0.5 if outcome.chosen else 0.8):
            _assign(talk, outcome, task, None)


def _assign(talk: Conversation, outcome: IssueOutcome, task: str, option: Option | None) -> None:
    """Give one task away, in one of the ways in which people do that."""
    rng, chair = talk.rng, talk.chair
    due = rng.randrange(len(DUES) - 3)
    owner = talk.someone(chair) if rng.random() < 0.85 else chair
    way = rng.choices(
        ("asked", "haggled", "declined", "called", "offered", "undated"), (4, 2, 2, 3, 3, 1)
    )[0]
    if owner == chair and way in ("asked", "haggled", "declined"):
        way = "offered"
    if way == "offered":
        talk.speak(owner, "offer", task=task, due=DUES[due])
    elif way == "undated":
        talk.speak(owner, "offer_undated", task=task)
    elif way == "called":
        talk.speak(talk.someone(owner), "who", task=task)
        talk.speak(owner, "take", due=DUES[due])
    else:
        talk.speak(chair, "assign", name=owner, task=task, due=DUES[due])
        if way == "haggled":
            later = _later(talk, due)
            talk.speak(owner, "haggle", due=DUES[due], later=DUES[later])
            talk.speak(chair, "grant", later=DUES[later])
            due = later
        elif way == "declined" and len(talk.names) > 2:
            other = talk.someone(owner, chair)
            talk.speak(owner, "decline", other=other)
            talk.speak(other, "accept")
            owner = other
        else:
            talk.speak(owner, "accept")
    outcome.assignments.append(
        TaskAssignment(owner, task, None if way == "undated" else due, option)
    )


def _later(talk: Conversation, due: int) -> int:
    return talk.rng.randint(due + 1, min(due + 4, len(DUES) - 1))
