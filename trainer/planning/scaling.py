"""The speed of a run by number of devices, for each strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.planning.decision import DDP, DILOCO, FSDP, MOTLEY, ONE, PIPELINE, TENSOR, Facts
from trainer.planning.devices import ClusterShape, HostPool
from trainer.planning.strategies import Request, StrategyOption, options
from trainer.planning.strategy import TrainingSetup
from trainer.planning.time import flops_per_token, speed_of

FOLLOWED = {
    "DDP": DDP,
    "FSDP2": FSDP,
    "TP": TENSOR,
    "PP": PIPELINE,
    "Motley": MOTLEY,
    "DiLoCo": DILOCO,
}
"""Whose fastest combination is followed."""


@dataclass(frozen=True)
class Point:
    """The fastest combination of a family on some of the devices."""

    devices: int
    option: StrategyOption
    speedup: float
    """Tokens a second, as a multiple of what the first device alone computes."""
    hours: float
    """Of the whole run."""


def scaling(request: Request) -> dict[str, list[Point]]:
    """Return the points of each family that fit, by growing parts of the cluster."""
    found: dict[str, list[Point]] = {name: [] for name in FOLLOWED}
    alone = _alone(request)
    if alone is None:
        return found
    for part in parts_of(request.cluster):
        asked = replace(request, cluster=part)
        facts = Facts(asked, options(asked))
        for name, leaf in FOLLOWED.items():
            family = facts.family(ONE if part.world == 1 else leaf)
            if not family or not family[0].fits or family[0].cost is None:
                continue
            seconds = family[0].cost.seconds
            found[name].append(Point(part.world, family[0], alone / seconds, seconds / 3600))
    return found


def _alone(request: Request) -> float | None:
    """Return the seconds that the first device computes for the run; None: its speed is unknown."""
    precision, on_host = request.computes_in
    training = TrainingSetup(
        method=request.method,
        rank=request.rank,
        length=request.length,
        precision=precision,
        on_host=on_host,
    )
    flops = speed_of(request.cluster.groups[0].device, training)
    if flops is None:
        return None
    each = flops_per_token(request.shape, training).value
    return request.tokens * each / (flops * request.efficiency)


def parts_of(cluster: ClusterShape) -> Iterator[ClusterShape]:
    """Yield growing parts: of the first host 1, 2, 4 devices and so on, then whole hosts.

    Equal hosts are doubled, others added in the order of their groups.
    """
    first = cluster.groups[0]
    size = 1
    while size < first.devices:
        yield ClusterShape(groups=(replace(first, hosts=1, devices=size),), between=None)
        size *= 2
    if cluster.is_equal:
        count = 1
        while count < cluster.hosts:
            yield _of_hosts(cluster, (replace(first, hosts=count),))
            count *= 2
    else:
        groups: list[HostPool] = []
        for group in cluster.groups[:-1]:
            yield _of_hosts(cluster, (*groups, replace(group, hosts=1)))
            groups.append(group)
            if group.hosts > 1:
                yield _of_hosts(cluster, tuple(groups))
    yield cluster


def _of_hosts(cluster: ClusterShape, groups: tuple[HostPool, ...]) -> ClusterShape:
    alone = sum(group.hosts for group in groups) == 1
    return ClusterShape(groups=groups, between=None if alone else cluster.between)
