"""Seconds of a step: compute, exposed communication and the pipeline's bubble."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trainer.config.codec import AUTO
from trainer.planning.device_models import DeviceModel
from trainer.planning.devices import ClusterShape, LinkRates
from trainer.planning.exchange_choice import (
    LEAST_ROUNDS,
    ChosenExchange,
    ExchangeCandidate,
    ExchangeLoad,
    choose_exchange,
    choose_first_fitting,
    exposed_seconds,
    make_rounds_candidate,
)
from trainer.planning.memory import adapter_parameters, trained_parameters
from trainer.planning.shapes import ModelShape
from trainer.planning.stored_layers import NF4_BYTES
from trainer.planning.strategy import Strategy, TrainingSetup
from trainer.planning.term import Term, term

EFFICIENCY = 0.4
"""Share of a device's peak that products reach; Megatron-LM's models reach 0.41 to 0.56
(arXiv 2205.05198, table 5). A measured rate replaces it."""
RING_BASE, INSIDE_HOP, BETWEEN_HOP = 6.6e-6, 3.4e-6, 14e-6
"""Seconds: start of a ring, and a hop over NVLink and over a network (NCCL, tuning.cc)."""

NARAYANAN = "Narayanan et al., arXiv 2104.04473, section 3 and appendix"
RINGS = "Thakur et al., 2005; NCCL's tuning.cc for the latencies"
STREAMING = "Motley: trainer/planning/streaming.py"
ZERO = "Rajbhandari et al., arXiv 1910.02054, section 7"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: Term
    exposed: Term
    """Communication that no computation hides."""
    bubble: Term
    choice: ChosenExchange | None = None
    """Choice of the codec, where a star exchanges."""

    @property
    def total(self) -> float:
        """Seconds together."""
        return self.compute.value + self.exposed.value + self.bubble.value

    def list_terms(self) -> list[Term]:
        """Return all terms."""
        return [self.compute, self.exposed, self.bubble]


def flops_per_token(shape: ModelShape, training: TrainingSetup) -> Term:
    """Return the operations of forward and backward for a token.

    Forward multiplies each weight once (2 operations) and the scores (`4 s q` a layer); backward
    takes twice that, and without gradients of frozen weights as much again for those alone.
    Full recomputation repeats the layers' forward, selective the scores; the reference of a
    comparison is a forward more. For a GPT it is
    `72 L h^2 (1 + s/6h + V/12Lh)`, and with recomputation `96 L h^2 (1 + s/6h + V/16Lh)`.
    """
    weights = shape.linear_parameters(active=True)
    scores = 2 * shape.layers * shape.queries * training.length
    again = 1 if training.recompute == "full" else 0
    reference = 1 if training.compared else 0
    scored = (3 if training.recompute == "none" else 4) + reference
    passes = (3 if training.method == "full" else 2) + reference
    passed = replace(shape, experts=shape.active_experts)
    new = adapter_parameters(passed, training) if training.method != "full" else 0
    head = shape.table_parameters if training.classes is None else 0
    return term(
        "operations a token",
        "2 * (passes + again) * weights + 2 * scored * scores + 2 * of_head * head + 6 * new",
        NARAYANAN,
        passes=passes,
        again=again,
        scored=scored,
        weights=weights,
        scores=scores,
        of_head=3 + reference if "lm_head" in training.whole else passes,
        head=head,
        new=new,
    )


def forward_flops_per_token(shape: ModelShape, length: float) -> Term:
    """Return the operations of a forward for a token of a window, with the logits' product."""
    weights = shape.linear_parameters(active=True)
    scores = 2 * shape.layers * shape.queries * length
    head = shape.table_parameters
    return term(
        "operations a token",
        "2 * (weights + scores + head)",
        NARAYANAN,
        weights=weights,
        scores=scores,
        head=head,
    )


def all_reduce(size: float, members: int, rate: float, hop: float = INSIDE_HOP) -> float:
    """Return the seconds of an all-reduce: the ring's or the tree's, whichever is less.

    Ring `2 (n-1) a + 2 (n-1)/n S/B`; tree about `2 log2(n) a + 2 S/B`.
    """
    if members == 1:
        return 0.0
    ring = RING_BASE + 2 * (members - 1) * hop + bus_factor("all_reduce", members) * size / rate
    tree = RING_BASE + 2 * math.log2(members) * hop + 2 * size / rate
    return min(ring, tree)


def gather_seconds(size: float, members: int, rate: float, hop: float = INSIDE_HOP) -> float:
    """Return the seconds of an all-gather, or of a reduce-scatter: half a ring's all-reduce."""
    if members == 1:
        return 0.0
    return RING_BASE + (members - 1) * hop + bus_factor("all_gather", members) * size / rate


def bus_factor(collective: str, members: int) -> float:
    """Return the bytes that cross the slowest link for each byte (nccl-tests, PERFORMANCE.md)."""
    if collective == "broadcast":
        return 1.0
    share = (members - 1) / members
    return 2 * share if collective == "all_reduce" else share


def bubble_share(strategy: Strategy) -> Term:
    """Return the bubble as a share of the ideal time of a step.

    `(p-1)/m` for GPipe and 1F1B, `(p-1)/(v m)` interleaved, 0 for ZB-V where forward and both
    halves of backward take equally long.
    """
    stages, microbatches, chunks = strategy.stages, strategy.microbatches, strategy.chunks
    numbers = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    name = "bubble, of the ideal step"
    if strategy.schedule == "zbv" or stages == 1:
        return term(name, "0", "Qi et al., arXiv 2401.10241")
    if strategy.schedule == "interleaved":
        return term(name, "(stages - 1) / (chunks * microbatches)", NARAYANAN, **numbers)
    return term(name, "(stages - 1) / microbatches", NARAYANAN, **numbers)


def plan_time(
    shape: ModelShape,
    training: TrainingSetup,
    strategy: Strategy,
    cluster: ClusterShape,
    *,
    total_tokens: float,
    efficiency: float = EFFICIENCY,
    rate: float | None = None,
) -> StepTime | None:
    """Return the time of a step; None where a device's speed is unknown.

    A step has `microbatches` micro-batches for each replica.

    Args:
        total_tokens: of the run; of its steps, rounds may take a twentieth each.
        rate: tokens a second of all devices, where they read layers at each use; None: their peak.
    """
    speeds = [
        find_speed(group.device, training) for group in cluster.groups for _ in range(group.count)
    ]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds):
        return None
    each = flops_per_token(shape, training)
    tokens = training.tokens * strategy.microbatches * strategy.replicas
    # Equal shares of equal devices; the mixed exchange gives each as much as it is fast.
    compute = term(
        "compute",
        "operations * tokens / (peak * efficiency)",
        each.source,
        operations=each.value,
        tokens=tokens,
        peak=sum(known[: strategy.world]),
        efficiency=efficiency,
    )
    if rate is not None:
        compute = term("compute", "tokens / rate", STREAMING, tokens=tokens, rate=rate)
    share = bubble_share(strategy)
    bubble = term(
        "bubble",
        f"compute * ({share.formula})",
        share.source,
        compute=compute.value,
        **share.numbers,
    )
    if strategy.data in ("motley", "diloco"):
        steps = max(1, int(total_tokens / tokens))
        asked = _star_load(shape, training, strategy, cluster, compute.value, steps)
        choice = _choose_codec(strategy, asked)
        return StepTime(compute, choice.taken.exposed, bubble, choice)
    return StepTime(
        compute, _exposed_seconds(shape, training, strategy, cluster, compute.value), bubble
    )


def find_speed(device: DeviceModel, training: TrainingSetup) -> float | None:
    """Return the peak of a device in the format of a training's products, on Vulkan fp32."""
    if device.backend == "wgpu":
        return device.fp32 or device.flops
    wide = training.precision.activation == 4
    if training.on_host:
        return device.flops if wide else None
    return device.fp32 if wide else device.flops


def _star_load(
    shape: ModelShape,
    training: TrainingSetup,
    strategy: Strategy,
    cluster: ClusterShape,
    compute: float,
    steps: int,
) -> ExchangeLoad:
    inside = cluster.groups[0].inside
    together = training.tokens + training.waiting  # a block is final at its layer's turn in these
    return ExchangeLoad(
        link=cluster.between or LinkRates(up=inside, down=inside),
        elements=trained_parameters(shape, training),
        blocks=shape.layers,
        step_seconds=compute,
        total_steps=steps,
        remotes=cluster.hosts - 1,
        microbatches=max(1, strategy.microbatches * training.tokens // together),
    )


def _choose_codec(strategy: Strategy, asked: ExchangeLoad) -> ChosenExchange:
    """Return the codec of an exchange after each step, or the length of rounds."""
    if strategy.data == "diloco":
        rounds = make_rounds_candidate(asked) or make_rounds_candidate(
            replace(asked, total_steps=LEAST_ROUNDS)
        )
        assert rounds is not None
        return choose_first_fitting(asked, [rounds])
    if strategy.codec == AUTO:
        return choose_exchange(asked, rounds=False)
    return choose_first_fitting(
        asked, [ExchangeCandidate(strategy.codec, 1, exposed_seconds(asked, strategy.codec))]
    )


def _exposed_seconds(
    shape: ModelShape,
    training: TrainingSetup,
    strategy: Strategy,
    cluster: ClusterShape,
    compute: float,
) -> Term:
    first = cluster.groups[0]
    inside = first.inside
    between = first.inside if cluster.between is None else cluster.between.down
    part = trained_parameters(shape, training) / (strategy.tensor * strategy.stages)
    gradient = part * training.precision.gradient
    backward = compute * 2 / 3
    spans_hosts = strategy.world > first.devices
    rate, hop = (between, BETWEEN_HOP) if spans_hosts else (inside, INSIDE_HOP)
    layer_input = training.tokens * shape.hidden * training.precision.activation
    tensor = 0.0
    if strategy.tensor > 1:
        each = 6 if training.recompute == "full" else 4
        layers = shape.layers / strategy.stages
        reduce = all_reduce(layer_input, strategy.tensor, inside)
        tensor = each * layers * strategy.microbatches * reduce
    stages = 0.0
    if strategy.stages > 1:
        stages = 2 * (strategy.stages - 1) * (hop + layer_input / strategy.tensor / rate)
    data, hidden, source = _of_replicas(
        shape, training, strategy, gradient, rate, hop, backward, compute
    )
    return term(
        "exposed communication",
        "max(0, replicas - hidden) + tensor + stages",
        source,
        replicas=data,
        hidden=hidden,
        tensor=tensor,
        stages=stages,
    )


def _of_replicas(
    shape: ModelShape,
    training: TrainingSetup,
    strategy: Strategy,
    gradient: float,
    rate: float,
    hop: float,
    backward: float,
    compute: float,
) -> tuple[float, float, str]:
    """Return seconds of communication between replicas, those that computation hides, a source.

    DDP and ZeRO-1, ZeRO-2 move 2 P, ZeRO-3 3 P: weights for forward and for each backward.
    ZeRO-3 reduces after each micro-batch, which keeps the gradients sharded.
    """
    count = strategy.replicas
    if count == 1:
        return 0.0, 0.0, RINGS
    if strategy.data == "fsdp":
        whole = shape.parameters / (strategy.tensor * strategy.stages)
        stored = NF4_BYTES if training.method == "qlora" else training.precision.activation
        gathers = 2 * strategy.microbatches * gather_seconds(whole * stored, count, rate, hop)
        reduced = strategy.microbatches * gather_seconds(gradient, count, rate, hop)
        return gathers + reduced, compute, ZERO
    if strategy.data == "ddp":
        return all_reduce(gradient, count, rate, hop), backward / strategy.microbatches, RINGS
    return 2 * gather_seconds(gradient, count, rate, hop), backward / strategy.microbatches, ZERO
