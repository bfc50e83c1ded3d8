"""The combinations worth a line, each at its fastest setting that fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.training import Precision
from trainer.planning.cost import NO_PRICES, Cost, Prices, plan_cost
from trainer.planning.device_models import DeviceModel
from trainer.planning.devices import ClusterShape
from trainer.planning.memory import MemoryParts
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import (
    AUTOCAST,
    FP32,
    SCHEDULES,
    Method,
    Recompute,
    Strategy,
    TrainingSetup,
)
from trainer.planning.streaming import WorkerPlan, plan_worker, total_rate
from trainer.planning.time import EFFICIENCY, StepTime, plan_time
from trainer.planning.vulkan_workers import plan_device_memory
from trainer.planning.workers import device_room

ROWS_EACH = 8
"""Rows of a step for each device, so that every combination has the same step."""
_WITH_QLORA = ("ddp", "fsdp", "motley")
_STREAMED = ("ddp", "motley")
"""Strategies of one process, or of a coordinator and workers of whole models."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The run to plan."""

    shape: ModelShape
    cluster: ClusterShape
    method: Method = "lora"
    rank: int = 16
    frozen_a: bool = False
    adapted_layers: int | None = None
    """None: all."""
    whole: Collection[str] = ()
    """Tables that train beside adapters."""
    compared: bool = False
    """Preferences are learned beside a frozen reference."""
    length: int = 2048
    precision: Literal["auto"] | Precision = "auto"
    """Precision of products; `auto`: 16 bits on accelerators, fp32 on processors."""
    recompute: bool | None = None
    """Gradient checkpointing; None: what is fastest of what fits."""
    tokens: float = 50e6
    prices: Prices = NO_PRICES
    efficiency: float = EFFICIENCY

    @property
    def tried(self) -> tuple[Recompute, ...]:
        """The ways to recompute activations that are tried."""
        if self.recompute is not None:
            return ("full" if self.recompute else "none",)
        # Fused attention keeps no scores.
        return tuple(way for way in _RECOMPUTE if way != "selective" or not self.shape.gated)

    @property
    def rows(self) -> int:
        """Rows of one step over all devices."""
        return ROWS_EACH * self.cluster.world


@dataclass(frozen=True, kw_only=True)
class StrategyOption:
    """One combination with its figures."""

    strategy: Strategy
    training: TrainingSetup
    memory: MemoryParts
    room: int
    """Bytes of the smallest device that may be used."""
    time: StepTime | None
    cost: Cost | None
    alternative: bool = False
    """Its method is not the one that is asked for."""
    workers: tuple[WorkerPlan, ...] = ()
    """Those of each kind of device, where some read layers of the base at each use; else none."""

    @property
    def fits(self) -> bool:
        """Whether the device that needs most has the memory, and each that must can read layers."""
        return self.has_memory and not self.refused

    @property
    def has_memory(self) -> bool:
        """Whether the device that needs most has the memory."""
        return self.memory.total <= self.room

    @property
    def refused(self) -> str:
        """Why a device that must read layers at each use cannot; empty if none must, or all can."""
        return next((f"{w.pool.title}: {w.refused}" for w in self.workers if w.refused), "")

    @property
    def title(self) -> str:
        """The strategy's title with the codec or the steps of a round, and another method."""
        choice = None if self.time is None else self.time.choice
        how = ""
        if choice is not None:
            how = f" H{choice.every}" if self.strategy.data == "diloco" else f" {choice.codec}"
        other = " QLoRA" if self.alternative else ""
        return self.strategy.title + how + other + (" streamed" if self.workers else "")

    @property
    def key(self) -> str:
        """Its name on a command line."""
        other = "-qlora" if self.alternative else ""
        return self.strategy.key + other + ("-streamed" if self.workers else "")

    @property
    def seconds(self) -> float:
        """Seconds of a step; unknown ones sort last."""
        return self.time.total if self.time is not None else float("inf")


def list_options(request: Request) -> list[StrategyOption]:
    """Return every combination worth a line."""
    strategies = list_combinations(request)
    found = [_plan_whole(request, strategy, request.method) for strategy in strategies]
    if request.method != "qlora":
        for strategy in strategies:
            if strategy.stages == strategy.tensor == 1 and strategy.data in _WITH_QLORA:
                found.append(replace(_plan_whole(request, strategy, "qlora"), alternative=True))
    for whole in list(found):
        method = whole.training.method
        if not whole.fits and (streamed := _plan_streamed(request, whole.strategy, method)):
            found.append(replace(streamed, alternative=whole.alternative))
    return found


def needs_reading(request: Request) -> bool:
    """Return whether an option that is worth a line reads layers at each use."""
    return any(option.workers for option in list_options(request))


def plan_option(request: Request, strategy: Strategy, method: Method) -> StrategyOption:
    """Return a combination with all layers in memory; if only then it fits, with some streamed."""
    whole = _plan_whole(request, strategy, method)
    streamed = None if whole.fits else _plan_streamed(request, strategy, method)
    return streamed if streamed and streamed.fits else whole


def _plan_streamed(request: Request, strategy: Strategy, method: Method) -> StrategyOption | None:
    """Return a combination whose workers read layers that do not fit at each use.

    None: its engine keeps all, or every layer trains.
    """
    alone = strategy.world == 1 or strategy.data == "motley"
    if method == "full" or not alone or strategy.data not in _STREAMED:
        return None
    workers = tuple(
        plan_worker(
            request.shape,
            pool,
            [
                _make_training(request, strategy, method, rows, recompute, pool.device)
                for rows in _list_rows(request.shape, pool.device)
                for recompute in request.tried
            ],
            strategy,
            request.efficiency,
            ROWS_EACH,
        )
        for pool in request.cluster.groups
    )
    tightest = max(workers, key=lambda one: one.memory.total / one.room)
    spread = replace(strategy, microbatches=ROWS_EACH // tightest.training.rows)
    option = _make_option(request, spread, tightest.training, workers)
    return replace(option, memory=tightest.memory, room=tightest.room, workers=workers)


def _list_rows(shape: ModelShape, device: DeviceModel) -> Sequence[int]:
    """Return the rows of a micro-batch that are tried.

    The wgpu engine plans layers beside one, since of several what waits takes least memory.
    """
    return (1,) if device.backend == "wgpu" and shape.is_decoder else (1, 2, 4, 8)


def _plan_whole(request: Request, strategy: Strategy, method: Method) -> StrategyOption:
    """Return a combination with the micro-batch and recomputation that fit and take least time.

    Without any that fits it is the one that needs least memory.
    """
    tried = list(_try_settings(request, strategy, method))
    fitting = [option for option in tried if option.fits]
    if not fitting:
        return min(tried, key=lambda option: option.memory.total)
    return min(fitting, key=lambda option: (option.seconds, option.memory.total))


def _try_settings(request: Request, strategy: Strategy, method: Method) -> Iterator[StrategyOption]:
    each = max(1, request.rows // strategy.replicas)
    rows = 1
    while rows <= max(1, each // max(1, strategy.stages)) and rows <= 32:
        if each % rows == 0:
            spread = replace(strategy, microbatches=each // rows)
            for recompute in request.tried:
                smallest = request.cluster.smallest.device
                yield _make_option(
                    request,
                    spread,
                    _make_training(request, strategy, method, rows, recompute, smallest),
                )
        rows *= 2


def _make_training(
    request: Request,
    strategy: Strategy,
    method: Method,
    rows: int,
    recompute: Recompute,
    device: DeviceModel,
) -> TrainingSetup:
    """Return the settings of a worker on a device."""
    on_host = device.is_processor
    narrow = not on_host if request.precision == "auto" else request.precision != "fp32"
    return TrainingSetup(
        method=method,
        rank=request.rank,
        frozen_a=request.frozen_a,
        adapted_layers=request.adapted_layers,
        whole=request.whole,
        compared=request.compared,
        length=request.length,
        rows=rows,
        recompute=recompute,
        precision=AUTOCAST if narrow else FP32,
        on_host=on_host,
        one_queue=device.backend == "wgpu",
        coordinates=on_host and strategy.world == 1,
    )


def _make_option(
    request: Request,
    strategy: Strategy,
    training: TrainingSetup,
    workers: Sequence[WorkerPlan] = (),
) -> StrategyOption:
    memory = plan_device_memory(request.shape, training, strategy)
    time = plan_time(
        request.shape,
        training,
        strategy,
        request.cluster,
        total_tokens=request.tokens,
        efficiency=request.efficiency,
        rate=total_rate(workers),
    )
    cost = None
    if time is not None:
        steps = request.tokens / (training.tokens * strategy.microbatches * strategy.replicas)
        cost = plan_cost(request.cluster, steps * time.total, request.prices)
    return StrategyOption(
        strategy=strategy,
        training=training,
        memory=memory,
        room=device_room(request.cluster.smallest.device).usable,
        time=time,
        cost=cost,
    )


def list_combinations(request: Request) -> list[Strategy]:
    """Return the combinations that people use on such a cluster."""
    cluster, shape = request.cluster, request.shape
    world = cluster.world
    if not cluster.can_share_model:
        return [Strategy(world=world, data="motley"), Strategy(world=world, data="diloco")]
    if world == 1:
        return [Strategy()]
    found = [Strategy(world=world, data=data) for data in ("ddp", "zero1", "zero2", "fsdp")]
    inside = cluster.groups[0].devices
    tensors = [
        size
        for size in (2, 4, 8)
        if size <= inside
        and not inside % size
        and not shape.heads % size
        and not shape.kv_heads % size
    ]
    for size in tensors[-1:]:
        data: Literal["ddp", "fsdp"]
        for data in ("ddp",) if size == world else ("ddp", "fsdp"):
            for sequence in (False, True):
                found.append(Strategy(world=world, data=data, tensor=size, sequence=sequence))
    stages = [size for size in _pipeline_sizes(cluster) if size <= shape.layers]
    for size in stages[:1]:
        found += [Strategy(world=world, stages=size, schedule=name) for name in SCHEDULES]
    if tensors and cluster.hosts > 1 and cluster.hosts <= shape.layers:
        found.append(
            Strategy(
                world=world,
                tensor=tensors[-1],
                sequence=True,
                stages=cluster.hosts,
                schedule="1f1b",
            )
        )
    found += [Strategy(world=world, data="diloco"), Strategy(world=world, data="motley")]
    return found


def _pipeline_sizes(cluster: ClusterShape) -> Sequence[int]:
    """Return numbers of stages: over the hosts, else over the devices of one."""
    return [cluster.hosts] if cluster.hosts > 1 else [cluster.world]
