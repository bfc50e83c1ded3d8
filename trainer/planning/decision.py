"""The rules that pick a strategy, and the diagram drawn from them.

Each rule is a question with a number that answers it. `docs/planning.md` shows the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.codec import FREE
from trainer.planning.devices import format_gib
from trainer.planning.exchange_choice import LEAST_ROUNDS
from trainer.planning.exchange_choice import MOST_EXPOSED as MOST_ADDED
from trainer.planning.strategies import Request, StrategyOption

MOST_EXPOSED = 0.2
"""Share of a step that communication may add before another strategy is better."""
MOST_SLOWER = 0.1
"""How much slower the simplest strategy may be and still be picked."""
Verdict = tuple[bool, str]
"""The answer, and the number that decided in words."""


@dataclass(frozen=True)
class Facts:
    """The facts that the rules use."""

    request: Request
    options: Sequence[StrategyOption]

    def options_of_leaf(self, leaf: Leaf) -> list[StrategyOption]:
        """Return the options of a leaf, those that fit before others, the fastest first."""
        found = [option for option in self.options if leaf.has(option)]
        return sorted(found, key=lambda option: (not option.fits, option.seconds))


@dataclass(frozen=True)
class Leaf:
    """A pick: a family of options."""

    key: str
    text: str
    has: Callable[[StrategyOption], bool]


@dataclass(frozen=True)
class Rule:
    """A question, and the next rule or pick for each answer."""

    key: str
    text: str
    ask: Callable[[Facts], Verdict]
    yes: Rule | Leaf
    no: Rule | Leaf


@dataclass(frozen=True)
class Pick:
    """The result of the rules."""

    option: StrategyOption | None
    """None: nothing fits."""
    sentence: str
    runner_up: str
    reason: str = ""
    """The number that decided."""
    second: StrategyOption | None = None
    """The fastest that fits of another kind, by the same method if there is one."""

    @property
    def lines(self) -> tuple[str, str]:
        """Both sentences."""
        return self.sentence, self.runner_up


def pick_strategy(request: Request, options: Sequence[StrategyOption]) -> Pick:
    """Apply the rules; return the pick, the number that decided, and the runner-up."""
    facts = Facts(request, options)
    leaf, reason = _walk_rules(ROOT, facts, "")
    family = facts.options_of_leaf(leaf)
    chosen = family[0] if family and family[0].fits else None
    if chosen is None:
        return Pick(None, f"Nothing fits: {reason}.", _suggest_remedy(options))
    rest = sorted(
        (option for option in options if option.fits and not leaf.has(option)),
        key=lambda option: option.seconds,
    )
    sentence = f"{chosen.title}: {reason}."
    if not rest:
        return Pick(chosen, sentence, "Nothing else fits.", reason)
    second = rest[0]
    runner_up = f"The runner-up is {second.title}: {_compare_options(second, chosen)}."
    like = next((one for one in rest if one.alternative == chosen.alternative), second)
    return Pick(chosen, sentence, runner_up, reason, like)


def _suggest_remedy(options: Sequence[StrategyOption]) -> str:
    """Return what would fit where nothing does."""
    if able := [option for option in options if option.has_memory and option.refused]:
        one = min(able, key=lambda option: option.seconds)
        need = f"{format_gib(one.memory.total)} of {format_gib(one.room)} GiB"
        return (
            f"{one.title} would need {need}: use devices that hold all layers; of a mixture of"
            " experts, CUDA devices and processors read them at each use."
        )
    least = min(options, key=lambda option: option.memory.total / option.room)
    ways = ["a device with more memory", "a smaller --length"]
    if least.training.method == "full":
        ways.insert(1, "method lora or qlora")
    need = f"{format_gib(least.memory.total)} of {format_gib(least.room)} GiB"
    return f"{least.title} needs least, {need}: use {', or '.join(ways)}."


def _compare_options(second: StrategyOption, chosen: StrategyOption) -> str:
    memory = f"{format_gib(second.memory.total)} GiB instead of {format_gib(chosen.memory.total)}"
    if second.time is None or chosen.time is None:
        return memory
    return f"{second.seconds:.3g} s a step instead of {chosen.seconds:.3g}, {memory}"


def _walk_rules(node: Rule | Leaf, facts: Facts, reason: str) -> tuple[Leaf, str]:
    while isinstance(node, Rule):
        answer, reason = node.ask(facts)
        node = node.yes if answer else node.no
    return node, reason


def _is_equal(facts: Facts) -> Verdict:
    cluster = facts.request.cluster
    kinds = len({group.device.name for group in cluster.groups})
    text = f"{len(cluster.groups)} kinds of hosts with {kinds} kinds of devices share the work"
    if cluster.is_equal:
        text = f"{cluster.groups[0].title}: torch computes on none of them"
    return cluster.can_share_model, text


def _is_single(facts: Facts) -> Verdict:
    one = facts.options[0]
    text = f"one device, {format_gib(one.memory.total)} of its usable {format_gib(one.room)} GiB"
    return facts.request.cluster.world == 1, text


def _make_fit_question(leaf: Leaf) -> Callable[[Facts], Verdict]:
    def ask(facts: Facts) -> Verdict:
        family = facts.options_of_leaf(leaf)
        if not family:
            return False, f"{leaf.text} is not possible on these devices"
        best = family[0]
        if not best.fits:
            best = min(family, key=lambda option: option.memory.total)
            if best.has_memory:
                return False, f"{best.title}: {best.refused}"
        verb = "needs" if best.fits else "needs even at least"
        return best.fits, (
            f"{best.title} {verb} {format_gib(best.memory.total)} of a device's usable"
            f" {format_gib(best.room)} GiB"
        )

    return ask


def _make_hiding_question(leaf: Leaf) -> Callable[[Facts], Verdict]:
    def ask(facts: Facts) -> Verdict:
        best = facts.options_of_leaf(leaf)[0]
        if best.time is None:
            return True, f"{best.title} fits; the devices' speed is not known"
        share = best.time.exposed.value / best.time.total
        text = (
            f"{best.title} fits and {100 * share:.0f} % of its step is communication that nothing"
            " hides"
        )
        return share <= MOST_EXPOSED, text

    return ask


def _codec_hides(facts: Facts) -> Verdict:
    best = facts.options_of_leaf(MOTLEY)[0]
    if best.time is None or best.time.choice is None:
        return True, f"{best.title} fits; the devices' speed is not known"
    choice = best.time.choice
    return choice.within, _describe_exchange(best, "after each step")


def _rounds_hide(facts: Facts) -> Verdict:
    seldom, often = facts.options_of_leaf(DILOCO)[0], facts.options_of_leaf(MOTLEY)[0]
    if seldom.fits and seldom.time is not None and seldom.time.choice is not None:
        choice = seldom.time.choice
        if choice.within:
            return True, _describe_exchange(seldom, f"once in {choice.every} steps")
    return False, _describe_exchange(often, "after each step") + "; no rounds fit the run"


def _describe_exchange(option: StrategyOption, when: str) -> str:
    assert option.time is not None
    assert option.time.choice is not None
    taken = option.time.choice.taken
    seconds = option.time.compute.value
    share = 100 * taken.exposed.value / seconds
    caution = "; rounds want twice the learning rate" if taken.every > 1 else ""
    return (
        f"{taken.codec} {when} adds {taken.exposed_ms:.3g} ms to a step of {seconds:.3g} s,"
        f" {share:.2g} %{caution}"
    )


def _as_fast(leaf: Leaf, others: Leaf) -> Callable[[Facts], Verdict]:
    def ask(facts: Facts) -> Verdict:
        best = facts.options_of_leaf(leaf)[0]
        rest = [option for option in facts.options_of_leaf(others) if option.fits]
        if not rest or best.time is None:
            return True, f"{best.title} fits, the others are not faster"
        text = (
            f"a step of {rest[0].title} takes {rest[0].seconds:.3g} s, one of {best.title}"
            f" {best.seconds:.3g} s"
        )
        return best.seconds <= (1 + MOST_SLOWER) * rest[0].seconds, text

    return ask


def _is_plain(option: StrategyOption) -> bool:
    return option.strategy.tensor == option.strategy.stages == 1 and not option.workers


def _matches_data(data: str) -> Callable[[StrategyOption], bool]:
    return lambda option: (
        _is_plain(option) and option.strategy.data == data and not option.alternative
    )


ONE = Leaf(
    "one",
    "one device",
    lambda found: found.strategy.world == 1 and not (found.alternative or found.workers),
)
MOTLEY = Leaf("motley", "Motley's exchange", _matches_data("motley"))
DDP = Leaf("ddp", "DDP", _matches_data("ddp"))
DILOCO = Leaf("diloco", "DiLoCo", _matches_data("diloco"))
FSDP = Leaf("fsdp", "FSDP2", _matches_data("fsdp"))
TENSOR = Leaf(
    "tensor",
    "TP+SP, with FSDP2 over hosts",
    lambda found: found.strategy.tensor > 1 and found.strategy.stages == 1,
)
PIPELINE = Leaf("pipeline", "PP", lambda found: found.strategy.stages > 1)
SPLIT = Leaf(
    "split",
    "the fastest of FSDP2, TP and PP",
    lambda found: (
        not (found.alternative or found.workers or DDP.has(found))
        and found.strategy.data in ("ddp", "fsdp")
    ),
)
QLORA = Leaf("qlora", "QLoRA: a base in NF4", lambda found: found.alternative and not found.workers)
STREAMED = Leaf("streamed", "layers read at each use", lambda found: bool(found.workers))
NOTHING = Leaf("nothing", "more devices, or shorter rows", lambda _: False)

_NF4 = Rule(
    "nf4_fits",
    "Does a base in NF4 fit?",
    _make_fit_question(QLORA),
    QLORA,
    Rule(
        "two_layers_fit",
        "Do two layers and a row fit, the others read at each use?",
        _make_fit_question(STREAMED),
        STREAMED,
        NOTHING,
    ),
)
_LAYERS = Rule(
    "tensor_fits",
    "Do layers fit that a host's devices share?",
    _make_fit_question(TENSOR),
    TENSOR,
    Rule("stages_fit", "Do stages of layers fit?", _make_fit_question(PIPELINE), PIPELINE, _NF4),
)
_SHARDED = Rule(
    "fsdp_hides",
    f"Does its communication take at most {MOST_EXPOSED:.0%} of a step?",
    _make_hiding_question(FSDP),
    FSDP,
    Rule(
        "stages_pay",
        "Do stages fit, which exchange less?",
        _make_fit_question(PIPELINE),
        PIPELINE,
        FSDP,
    ),
)
_MEMORY = Rule(
    "fsdp_fits", "Memory problem. Does FSDP2 fit?", _make_fit_question(FSDP), _SHARDED, _LAYERS
)
_THROUGHPUT = Rule(
    "ddp_hides",
    f"Throughput problem. Does the all-reduce take at most {MOST_EXPOSED:.0%} of a step?",
    _make_hiding_question(DDP),
    Rule(
        "ddp_is_fast",
        f"Is DDP at most {MOST_SLOWER:.0%} slower than a split model?",
        _as_fast(DDP, SPLIT),
        DDP,
        SPLIT,
    ),
    DILOCO,
)
_SEVERAL = Rule(
    "whole_fits",
    "Does a device hold a whole replica?",
    _make_fit_question(DDP),
    _THROUGHPUT,
    _MEMORY,
)
_STAR = Rule(
    "codec_hides",
    f"Does {', '.join(FREE[:-1])} or {FREE[-1]} add at most {MOST_ADDED:.0%} to a step?",
    _codec_hides,
    MOTLEY,
    Rule(
        "rounds_hide",
        f"Do rounds of int4, at least {LEAST_ROUNDS} in the run?",
        _rounds_hide,
        DILOCO,
        MOTLEY,
    ),
)
ROOT = Rule(
    "equal",
    "Are all devices equal, and torch's?",
    _is_equal,
    Rule(
        "single",
        "Is it one device?",
        _is_single,
        Rule("one_fits", "Does it hold the run?", _make_fit_question(ONE), ONE, _NF4),
        _SEVERAL,
    ),
    Rule(
        "least_fits",
        "Does the smallest device hold a replica?",
        _make_fit_question(MOTLEY),
        _STAR,
        _NF4,
    ),
)
