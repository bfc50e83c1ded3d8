"""Checks of a run's memory on a host: whether it suffices, and how fast layers are read that do not
stay in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from pydantic import validate_call

from launcher.agent.checks.finding import Finding
from launcher.agent.checks.host_speeds import READ_SECONDS, measure_products, measure_read
from launcher.agent.checks.job import model_folder
from launcher.agent.operation import check
from launcher.inventory.facts.devices import available_memory
from launcher.plan.plan import LaunchPlan, ProcessPlan
from trainer.config.run import RunConfig
from trainer.planning.device_models import DeviceModel, find_device
from trainer.planning.devices import PCIE, HostPool, LayerSource
from trainer.planning.replica import (
    MemoryPlan,
    busy_tokens,
    group_tokens,
    make_training_setup,
    most_tokens,
)
from trainer.planning.resident_layers import describe_residents
from trainer.planning.stored_layers import layer_bytes
from trainer.planning.strategy import TrainingSetup
from trainer.planning.streaming import HIDDEN, plan_reading
from trainer.planning.time import EFFICIENCY, find_speed
from trainer.planning.workers import Room, RunMemory, coordinator_memory
from trainer.system.backends import BACKENDS, Backend
from trainer.system.errors import InputError

_SAVED = 12
"""Bytes a trainable weight: it and both moments, which rank 0 of a ring gathers."""
_GIB = 1 << 30
_SEE_MODEL = "see its check `model`"


@dataclass(frozen=True)
class _MainMemory:
    """Main memory that a plan takes of this machine."""

    workers: int
    """On the CPU."""
    planned: MemoryPlan | None
    """The memory of each of them; None without any."""
    others: int
    """Bytes of the coordinator, or of what rank 0 of a ring saves."""
    who: str
    available: int | None

    @property
    def needed(self) -> int:
        """Bytes together."""
        return self.others + (self.planned.least * self.workers if self.planned else 0)


def _plan_main_memory(
    plan: LaunchPlan, config: RunConfig, memory: RunMemory, hosts: Sequence[str]
) -> _MainMemory:
    own = [worker for worker in plan.workers if worker.host in hosts]
    workers = sum(len(worker.devices) for worker in own if worker.backend == "cpu")
    who, others = f"{workers} CPU worker{'' if workers == 1 else 's'}", 0
    if plan.leader.host in hosts:
        ring = plan.leader.role == "worker"
        others = (
            _SAVED * memory.layout.size
            if ring
            else coordinator_memory(memory.layout, len(plan.workers), config.exchange)
        )
        leader = "what rank 0 saves" if ring else "the coordinator"
        who = f"{who} and {leader}" if workers else leader
    available = available_memory()
    room = math.inf if available is None else Room(available, "cpu").usable
    each = memory.plan_worker("cpu", (room - others) / workers) if workers else None
    return _MainMemory(workers, each, others, who, available)


@check("memory")
@validate_call
def check_memory(plan: LaunchPlan, config: RunConfig, hosts: list[str]) -> Finding:
    """F-HET-002: whether this machine's part of a plan fits its memory.

    CPU workers and the coordinator share the main memory; each GPU worker has its card's.

    Args:
        hosts: the inventory's names of this machine.
    """
    try:
        folder = model_folder(config)
        if folder is None:
            return Finding("warn", "not planned: the model is not on this machine", _SEE_MODEL)
        memory = RunMemory.of_model_folder(folder, config)
    except InputError:
        return Finding("warn", "not planned: the model cannot be read", _SEE_MODEL)
    own = [worker for worker in plan.workers if worker.host in hosts]
    for worker in own:
        size, backend = plan.device_memory(worker), cast("Backend", worker.backend)
        if backend == "wgpu" and memory.not_on_wgpu is not None:
            return Finding(
                "fail",
                f"{worker.name} computes with wgpu: {memory.not_on_wgpu}",
                "give the host `cuda` or `cpu` in motley_devices",
            )
        if BACKENDS[backend].is_gpu and size is not None:
            usable, needed = Room(size, backend).usable, memory.needed_bytes(backend)
            if needed > usable:
                needed = memory.plan_worker(backend, usable).least
            if needed > usable:
                return _too_little(f"{worker.name} on {worker.device}", needed, size, config)
    main = _plan_main_memory(plan, config, memory, hosts)
    if main.available is not None and main.needed > Room(main.available, "cpu").usable:
        return _too_little(main.who, main.needed, main.available, config, on_cpu=main.workers)
    free = "" if main.available is None else f" of {main.available / _GIB:.1f}"
    streamed = ""
    if main.planned is not None and main.planned.resident is not None:
        residents = describe_residents(main.planned.resident, memory.model.layers)
        streamed = f": {residents} in each CPU worker"
    return Finding("ok", f"{main.needed / _GIB:.1f}{free} GiB main memory planned{streamed}")


def _too_little(
    who: str, needed: int, available: int, config: RunConfig, *, on_cpu: int = 0
) -> Finding:
    ways = ["lower --expect-workers or data.max_seq_len"]
    if config.method == "full":
        ways.append("use method lora")
    elif on_cpu and config.model.resident not in ("auto", 0):
        ways.append("set model.resident auto")
    elif config.model.quantization != "nf4":
        ways.append("set model.quantization nf4")
    return Finding(
        "fail",
        f"{who} need {needed / _GIB:.1f} GiB, {available / _GIB:.1f} GiB are free",
        ", or ".join(ways),
    )


@check("layers", deadline=READ_SECONDS + 30)
@validate_call
def check_layers(plan: LaunchPlan, config: RunConfig, hosts: list[str]) -> Finding:
    """Return how much reading layers at each use slows this machine's workers.

    The disk is read for two seconds, and products are computed, unless all layers stay. The speeds
    of a card and of its link are assumed.

    Args:
        hosts: the inventory's names of this machine.
    """
    try:
        folder = model_folder(config)
        memory = None if folder is None else RunMemory.of_model_folder(folder, config)
    except InputError:
        memory = None
    if memory is None:
        return Finding("warn", "not planned: the model cannot be read here", _SEE_MODEL)
    main = _plan_main_memory(plan, config, memory, hosts)
    cards = list(_find_reading_cards(plan, memory, hosts))
    on_host = main.planned is not None and main.planned.resident is not None
    if not on_host and not cards:
        return Finding("ok", "all stay in memory")
    read = measure_read({header.file for header in memory.headers.values()})
    lines: list[str] = []
    speeds: list[float] = []
    if on_host:
        assert main.planned is not None
        each = None if main.available is None else (main.available - main.others) / main.workers
        training = _training_of_worker(plan, config, main.planned, each, accelerator=False)
        flops = measure_products()
        source = LayerSource(name="the disk", rate=read / main.workers)
        plan_passes = partial(plan_reading, memory.model, flops=flops / main.workers, source=source)
        reading, least = plan_passes(training), plan_passes(replace(training, resident=0))
        assert reading is not None
        assert least is not None
        more = _suggest_batch(plan, memory, main, least.hidden_from)
        lines.append(f"{reading.describe(more)}; products at {flops / 1e9:.3g} GFLOP/s")
        speeds.append(reading.speed)
    for worker, pool, planned in cards:
        name, one_queue = worker.name, worker.backend == "wgpu"
        assert planned.resident is not None
        free = main.available if planned.waits_on_host else pool.device.memory
        training = _training_of_worker(plan, config, planned, free, accelerator=True)
        training = replace(training, one_queue=one_queue)
        peak = find_speed(pool.device, training)
        if peak is None:
            lines.append(f"{name}: {describe_residents(planned.resident, memory.model.layers)}")
            continue
        pool = replace(pool, main_memory=main.available, disk=read)
        source = pool.find_source(memory.model.layers * layer_bytes(memory.model, training))
        reading = plan_reading(memory.model, training, peak * EFFICIENCY, source, pool.feed)
        assert reading is not None
        lines.append(f"{name}: {reading.describe()}")
        speeds.append(reading.speed)
    slow = min(speeds, default=1.0) < HIDDEN
    return Finding("warn" if slow else "ok", "; ".join(lines))


def _find_reading_cards(
    plan: LaunchPlan, memory: RunMemory, hosts: Sequence[str]
) -> Iterator[tuple[ProcessPlan, HostPool, MemoryPlan]]:
    """Yield the workers on cards that do not hold all layers, with card and memory."""
    for worker in plan.workers:
        backend, size = cast("Backend", worker.backend), plan.device_memory(worker)
        if worker.host not in hosts or not BACKENDS[backend].is_gpu or size is None:
            continue
        if not memory.may_stream:
            continue
        planned = memory.plan_worker(backend, Room(size, backend).usable)
        if planned.resident is not None:
            known = plan.get_host(worker.host).devices or ()
            title = next((card.name for card in known if card.id == worker.device), "")
            device = DeviceModel(
                name=title, flops=None, memory=size, watts=None, source="its driver"
            )
            with contextlib.suppress(InputError):
                device = find_device(title, size)
            pool = HostPool(hosts=1, devices=1, device=device, inside=PCIE)
            yield worker, pool, planned


def _training_of_worker(
    plan: LaunchPlan,
    config: RunConfig,
    planned: MemoryPlan,
    available: float | None,
    *,
    accelerator: bool,
) -> TrainingSetup:
    """Return a worker's micro-batch and what waits beside it, of its share of a batch at most.

    Args:
        available: bytes where it waits, before the base is loaded if it is there; None: unknown.
    """
    training = make_training_setup(config, accelerator=accelerator, recompute=planned.recompute)
    share = config.training.batch_size * training.rows // len(plan.workers)
    most = busy_tokens(config, accelerator=True) if accelerator else most_tokens(config)
    rows = max(1, min(share, most // training.length))
    training = replace(training, resident=planned.resident, rows=rows)
    training = replace(training, logit_chunks=planned.logit_chunks)
    loaded = 0 if planned.waits_on_host else planned.frozen + planned.trainable
    group = group_tokens(planned, int(available or 0) - loaded, training.tokens)
    waiting = min(share * training.length, group) - training.tokens
    return replace(training, waiting=max(0, waiting // training.tokens * training.tokens))


def _suggest_batch(plan: LaunchPlan, memory: RunMemory, main: _MainMemory, tokens: int) -> str:
    """Return the batch that has passes of so many tokens; empty if they have no memory."""
    emptiest = memory.plan_resident("cpu", 0)
    samples = -(-tokens // emptiest.sample_tokens)
    waiting = (samples - 1) * emptiest.sample_tokens * emptiest.per_waiting_token
    room = math.inf
    if main.available is not None:
        room = Room(main.available, "cpu").usable - main.others
    if not emptiest.per_waiting_token:  # a batch makes no pass larger
        return ""
    fits = (emptiest.least + waiting) * main.workers <= room
    return f"training.batch_size {samples * len(plan.workers)}" if fits else ""
