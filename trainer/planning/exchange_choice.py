"""The time that a star's exchange adds to a step, by codec, and the choice of `auto`.

Pure arithmetic: the planner asks it before a run, the coordinator during one. A coordinator and
remote hosts around it send a gradient up and its average down, a block after the other while
backward computes the next. `docs/low-bandwidth.md` has the codecs.

    link = LinkRates(up=6.25e6, down=6.25e6)
    choice = choose(ExchangeLoad(link=link, elements=5_898_240, blocks=36,
                                 step_seconds=1.0, total_steps=2000))
    choice.codec, choice.every        # ("int4", 22)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.codec import AUTO, CODECS, FREE, find_codec
from trainer.planning.devices import LinkRates
from trainer.planning.term import Term, term
from trainer.system.errors import InputError

ROUNDS_CODEC = next(name for name, kind in CODECS.items() if kind.planned == "rounds")
MOST_EXPOSED = 0.05
"""Share of a step that an exchange may add."""
LEAST_ROUNDS = 20
"""Minimum outer steps of a run; below it replicas diverge."""
OVERLAP = 0.5
"""Share of the last micro-batch's time during which finished blocks can travel."""

STAR = "Motley: docs/low-bandwidth.md, a star around the coordinator"
DILOCO = "Douillard et al., arXiv 2311.08105: one exchange in H steps, nothing overlaps"


@dataclass(frozen=True, kw_only=True)
class ExchangeLoad:
    """The facts about a run from which its codec is chosen.

    Raises:
        InputError: a size is not positive, or the number of remote hosts is negative.
    """

    link: LinkRates
    """Link of the slowest remote host."""
    elements: float
    """Elements of a gradient: the trained parameters."""
    blocks: int
    """Parts of a gradient that travel one after the other: the layers."""
    step_seconds: float
    """Seconds of a step without its exchange."""
    total_steps: int
    remotes: int = 1
    """Hosts beside the coordinator's; one stream comes from each."""
    microbatches: int = 1
    """Micro-batches of a step; blocks travel during the backward of the last."""
    coordinator: LinkRates | None = None
    """The coordinator's own link, with `up` towards it; None: as fast as `link`."""
    hidden: float | None = None
    """Seconds of an exchange beside backward, where they were measured; None: `OVERLAP` says it."""

    def __post_init__(self) -> None:
        sizes = (self.elements, self.blocks, self.step_seconds, self.total_steps, self.microbatches)
        if min(sizes) <= 0 or self.remotes < 0:
            raise InputError(
                "elements, blocks, step_seconds, total_steps and microbatches must be positive, and"
                f" remotes at least 0; got {', '.join(f'{size:g}' for size in sizes)} and"
                f" {self.remotes}"
            )


@dataclass(frozen=True)
class ExchangeCandidate:
    """One way to exchange, with its cost."""

    codec: str
    every: int
    """Steps from one exchange to the next; more than 1 are a round."""
    exposed: Term
    """Seconds that it adds to each step, on average."""

    @property
    def exposed_ms(self) -> float:
        """The same in milliseconds."""
        return 1000 * self.exposed.value


@dataclass(frozen=True)
class ChosenExchange:
    """The chosen candidate, and all candidates."""

    taken: ExchangeCandidate
    within: bool
    """Whether it adds at most `MOST_EXPOSED`; if none does, the one that adds least is taken."""
    candidates: tuple[ExchangeCandidate, ...]

    @property
    def codec(self) -> str:
        """Its name in `exchange.codec`."""
        return self.taken.codec

    @property
    def is_exact(self) -> bool:
        """Whether gradients travel as they are, which needs no setting."""
        return find_codec(self.codec).is_exact

    @property
    def setting(self) -> str:
        """The value for `exchange.codec`; among free codecs the run chooses by measuring."""
        return AUTO if self.codec in FREE else self.codec

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return self.taken.every


def choose_exchange(exchange: ExchangeLoad, *, rounds: bool = True) -> ChosenExchange:
    """Return the first of bf16, int8 and rounds of int4 that a step can hide.

    Rounds have as many steps as are needed for that, at most a twentieth of the run. Without a
    remote host it is fp32: nothing crosses a network.

    Args:
        rounds: whether a run may exchange less often than after each step.
    """
    if not exchange.remotes:
        return choose_first_fitting(
            exchange, [ExchangeCandidate("fp32", 1, exposed_seconds(exchange, "fp32"))]
        )
    found = [ExchangeCandidate(codec, 1, exposed_seconds(exchange, codec)) for codec in FREE]
    seldom = make_rounds_candidate(exchange) if rounds else None
    return choose_first_fitting(exchange, [*found, seldom] if seldom else found)


def choose_first_fitting(
    exchange: ExchangeLoad, candidates: Sequence[ExchangeCandidate]
) -> ChosenExchange:
    """Return the first candidate that adds at most 5 % to a step, else the one that adds least."""
    most = MOST_EXPOSED * exchange.step_seconds * (1 + 1e-9)  # H* is made to meet it exactly
    taken = next((one for one in candidates if one.exposed.value <= most), None)
    least = min(candidates, key=lambda one: one.exposed.value)
    return ChosenExchange(taken or least, taken is not None, tuple(candidates))


def make_rounds_candidate(exchange: ExchangeLoad) -> ExchangeCandidate | None:
    """Return rounds of H* steps, or of the most that the run allows; None: it is too short."""
    most = exchange.total_steps // LEAST_ROUNDS
    if most < 1:
        return None
    every = min(hiding_rounds(exchange), most)
    return ExchangeCandidate(ROUNDS_CODEC, every, exposed_by_rounds(exchange, every))


def hiding_rounds(exchange: ExchangeLoad) -> int:
    """Return H*: the least steps of a round with which an exchange adds at most 5 % to each."""
    allowed = MOST_EXPOSED * exchange.step_seconds * (1 + 1e-9)
    return max(1, math.ceil(exposed_by_rounds(exchange, 1).value / allowed))


def exposed_seconds(exchange: ExchangeLoad, codec: str) -> Term:
    """Return the seconds that an exchange after each step adds.

    `RTT + max(W - f t/m, (U + D)/(L B))`: what the last micro-batch's backward does not hide, but
    at least the last block's way up and down.
    """
    each = element_bytes(codec)
    round_trip, wire, block = _exchange_seconds(exchange, each)
    if exchange.hidden is not None:
        return term(
            "exposed communication",
            "round_trip + max(wire - hidden, block)",
            STAR,
            round_trip=round_trip,
            wire=wire,
            hidden=exchange.hidden,
            block=block,
        )
    return term(
        "exposed communication",
        "round_trip + max(wire - overlap * step / microbatches, block)",
        STAR,
        round_trip=round_trip,
        wire=wire,
        overlap=OVERLAP,
        step=exchange.step_seconds,
        microbatches=exchange.microbatches,
        block=block,
    )


def exposed_by_rounds(exchange: ExchangeLoad, every: int) -> Term:
    """Return the seconds that one exchange in `every` steps adds to each of them.

    `(RTT + W + (U + D)/(L B)) / H`.
    """
    round_trip, wire, block = _exchange_seconds(exchange, element_bytes(ROUNDS_CODEC))
    return term(
        "exposed communication",
        "(round_trip + wire + block) / every",
        DILOCO,
        round_trip=round_trip,
        wire=wire,
        block=block,
        every=every,
    )


def _exchange_seconds(exchange: ExchangeLoad, each: float) -> tuple[float, float, float]:
    """Return the seconds of a round trip, of everything on the wire, and of the last block.

    Both directions take the same bytes: the average is encoded once more on its way down. Workers
    beside the coordinator cost nothing.
    """
    if not exchange.remotes:
        return 0.0, 0.0, 0.0
    link, size = exchange.link, each * exchange.elements
    centre = exchange.coordinator or link
    wire = max(
        link.transfer_seconds(size, size), centre.transfer_seconds(*(exchange.remotes * size,) * 2)
    )
    block = (size / link.up + size / link.down) / exchange.blocks
    return link.round_trip, wire, block


def element_bytes(codec: str) -> float:
    """Return the bytes that a codec needs for an element of a large tensor.

    Raises:
        InputError: there is no such codec.
    """
    try:
        return find_codec(codec).element_bytes
    except ValueError as error:
        raise InputError(str(error)) from None
