"""Pipeline schedules over time: the actions of each device, if a message takes no time.

A device's order of actions is the schedule's own; when each begins follows from what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from trainer.config.parallel import Schedule

Kind = Literal["forward", "backward", "inputs", "weights"]
"""`inputs` and `weights` are the two halves of a backward."""
UNITS: dict[Kind, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Durations: a backward takes twice as long as a forward, of the same chunk of layers."""
_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "inputs"}


@dataclass(frozen=True)
class Action:
    """A device's action on one micro-batch of one chunk of layers."""

    kind: Kind
    chunk: int
    """Of all chunks, in the order that a micro-batch passes them."""
    microbatch: int
    start: float = 0.0

    @property
    def stop(self) -> float:
        """When it ends."""
        return self.start + UNITS[self.kind]


Timeline = list[list[Action]]
"""The actions of each device, in order."""


def timeline(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> Timeline:
    """Return when each of `stages` devices does what.

    Args:
        chunks: of each device.
    """
    orders = [_order(schedule, rank, stages, microbatches, chunks) for rank in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    made: Timeline = [[] for _ in orders]
    last = stages * chunks - 1
    while any(len(mine) < len(order) for mine, order in zip(made, orders, strict=True)):
        moved = False
        for mine, order in zip(made, orders, strict=True):
            while len(mine) < len(order):
                action = order[len(mine)]
                waits = [done.get(need) for need in _needs(action, last)]
                if None in waits:
                    break
                ready = [stop for stop in waits if stop is not None]
                start = max([mine[-1].stop if mine else 0.0, *ready])
                mine.append(replace(action, start=start))
                done[_result(action)] = mine[-1].stop
                moved = True
        assert moved, f"{schedule} waits for itself"
    return made


def idle_share(made: Timeline) -> float:
    """Return the bubble as a share of the ideal time, of the device that waits most.

    A device's step is from its first to its last action: those of ZB-V are shifted, and have none.
    """
    return max(
        (rank[-1].stop - rank[0].start) / sum(UNITS[action.kind] for action in rank) - 1
        for rank in made
    )


def _result(action: Action) -> tuple[str, int, int]:
    way = {"forward": "down", "backward": "up", "inputs": "up", "weights": "weights"}[action.kind]
    return way, action.chunk, action.microbatch


def _needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield the results that an action waits for."""
    chunk, number = action.chunk, action.microbatch
    if action.kind == "forward":
        if chunk:
            yield "down", chunk - 1, number
    elif action.kind == "weights":
        yield "up", chunk, number
    else:
        yield "down", chunk, number
        if chunk < last:
            yield "up", chunk + 1, number


def _order(
    schedule: Schedule, rank: int, stages: int, microbatches: int, chunks: int
) -> list[Action]:
    if schedule in ("zbv", "dualpipev"):
        steps, least = (_zbv, -1) if schedule == "zbv" else (_dualpipev, 0)
        words = steps(rank, stages, max(2 * stages + least, microbatches))
        return _numbered(words, (rank, 2 * stages - 1 - rank), microbatches)
    each = microbatches * chunks
    forward, backward = (
        list(_interleaved(kind, rank, stages, microbatches, chunks))
        for kind in ("forward", "backward")
    )
    ahead = each
    if schedule == "1f1b":
        ahead = stages - rank - 1
    elif schedule == "interleaved":
        ahead = 2 * (stages - rank - 1) + (chunks - 1) * stages
    ahead = min(ahead, each)
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += [one, other]
    return found + backward[each - ahead :]


def _interleaved(
    kind: Kind, rank: int, stages: int, microbatches: int, chunks: int
) -> Iterator[Action]:
    """Yield a device's actions: `stages` micro-batches through a chunk, then through the next."""
    order = range(chunks) if kind == "forward" else reversed(range(chunks))
    mine = [chunk * stages + rank for chunk in order]
    for group in range(0, microbatches, stages):
        for chunk in mine:
            for number in range(group, min(group + stages, microbatches)):
                yield Action(kind, chunk, number)


def _zbv(rank: int, stages: int, microbatches: int) -> Iterator[str]:
    """Yield actions by kind and chunk, after arXiv 2401.10241, section 6."""
    rest = stages - rank
    yield from ["F0"] * (2 * rest - 1)
    yield from ["F1", "F0"] * rank
    yield from ["F1", "I1", "W1"] * rest
    begun, ended = 2 * rest - 1 + rank, stages
    while begun < microbatches or ended < begun:
        if begun < microbatches:
            yield "F0"
            begun += 1
        yield from ("I0", "W0", "F1", "I1", "W1")
        ended += 1
    yield from ["I0", "I1"] * rank
    yield from ["I0", "W0"] * rest
    yield from ["W1"] * rank
    yield from ["W0"] * rank


def _dualpipev(rank: int, stages: int, microbatches: int) -> Iterator[str]:
    """Yield actions by kind and chunk, after the eight steps of github.com/deepseek-ai/DualPipe."""
    rest = stages - rank - 1
    yield from ["F0"] * (2 * rest)
    yield from ["F0", "F1"] * (rank + 1)
    yield from ["I1", "W", "F1"] * rest
    yield from ["F0", "B1", "F1", "B0"] * (microbatches - 2 * stages + rank + 1)
    yield from ["B1", "F1", "B0"] * rest
    for place in range(2 * (rank + 1)):  # the later ones leave their second halves for the end
        yield ("B" if place <= rank else "I") + "10"[place % 2]
    yield from ["W", "I0"] * rest
    yield from ["W"] * (rank + 1)


def _numbered(words: Iterator[str], held: Sequence[int], microbatches: int) -> list[Action]:
    """Return actions whose micro-batches are counted; `W` takes the oldest half that is left."""
    counts: dict[str, int] = {}
    left: list[Action] = []
    found: list[Action] = []
    for word in words:
        if word[0] == "W":
            chunk = held[int(word[1])] if word[1:] else left[0].chunk
            half = next(action for action in left if action.chunk == chunk)
            left.remove(half)
            found.append(replace(half, kind="weights"))
            continue
        way = word.replace("I", "B")  # both count as a backward
        action = Action(_KINDS[word[0]], held[int(word[1])], counts.get(way, 0))
        counts[way] = action.microbatch + 1
        found.append(action)
        left += [action] if word[0] == "I" else []
    return [action for action in found if action.microbatch < microbatches]


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, as evenly as possible.

    The first stage also computes the embedding and the last one the head: of layers that are left
    over they get one only if every stage between them has one, and the last stage never.
    """
    least, left = divmod(num_layers, stages)
    assert least, f"{num_layers} layers are too few for {stages} stages"
    # Later stages keep the activations of fewer micro-batches, so they come first.
    with_one_more = [*range(stages - 2, 0, -1), 0][:left]
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + least + (stage in with_one_more))
    return [range(*pair) for pair in pairwise(bounds)]
