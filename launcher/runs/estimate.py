"""Estimate the cost of a start with the plan of `launch plan`, for its hosts' devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from launcher.agent.checks.job import read_scoring_workload, read_student_shape, read_workload
from launcher.agent.operation import Operation
from launcher.errors import ConfigError, InvalidAnswerError
from launcher.hosts.survey import Survey
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.distill_commands import path_below
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.plan_inputs import describe_cluster, slowest_link
from trainer.config import run as run_config
from trainer.config.budget import BudgetConfig
from trainer.config.distill_job import DistillJob, is_shape_file
from trainer.config.run import SCRIPT, RunConfig
from trainer.planning.cost import Cost, Prices, plan_cost
from trainer.planning.devices import ClusterShape, LinkRates
from trainer.planning.distillation import distillation_seconds, scoring_seconds
from trainer.planning.shapes import ModelShape
from trainer.planning.strategies import Request
from trainer.planning.strategies import plan_option as plan_strategy
from trainer.planning.strategy import Method, Strategy

P = ParamSpec("P")
R = TypeVar("R")
_USUAL_LINK = LinkRates(up=125e6, down=125e6)
"""Between hosts of a run without a measured rate: 1 Gbit/s."""


def estimate_cost(
    job: RunConfig | DistillJob, plan: LaunchPlan, found: Survey, done: int = 0
) -> Cost | None:
    """Return the estimated cost of the rest of a run; None if it cannot be planned.

    A fine-tune is planned for Motley's exchange, a distillation as in
    `trainer.planning.distillation`.

    Args:
        done: steps of earlier attempts.

    Raises:
        UnreachableError: a host does not answer.
    """
    assert job.budget is not None
    try:
        if isinstance(job, DistillJob):
            return _estimate_distillation(job, job.budget, plan, found, done)
        return _estimate_fine_tune(job, job.budget, plan, found, done)
    except ConfigError:
        return None  # an unknown device, or a codec whose size the plan does not know


def _estimate_fine_tune(
    config: RunConfig, budget: BudgetConfig, plan: LaunchPlan, found: Survey, done: int
) -> Cost | None:
    if config.task == SCRIPT:
        return None  # of whose model nothing is known
    settings = config.model_dump(mode="json", exclude_unset=True)
    work = _ask_process_host(found, plan.leader, read_workload, settings)
    if work is None:
        return None
    left = _remaining_fraction(config, done, work.samples)
    hosts = _list_active_hosts(plan)
    rate = slowest_link(hosts)
    cluster = describe_cluster(hosts, LinkRates(up=rate, down=rate) if rate else _USUAL_LINK)
    strategy = Strategy(world=cluster.world, data="motley", codec=config.exchange.codec)
    if config.exchange.is_ring:
        strategy = Strategy(world=cluster.world, data="ddp")
    strategy = Strategy() if cluster.world == 1 else strategy
    return _estimate_training(config, budget, work.shape, cluster, left * work.tokens, strategy)


def _estimate_distillation(
    job: DistillJob, budget: BudgetConfig, plan: LaunchPlan, found: Survey, done: int
) -> Cost | None:
    if job.student.distillation.on_policy is not None:
        return None  # how fast a student writes its answers is known when it has written some
    teachers = [process for process in plan.processes if process.role == "teacher"]
    scoring = _ask_process_host(
        found,
        teachers[0],
        read_scoring_workload,
        **_corpus_description(job, teachers[0]),
    )
    shape = _ask_process_host(
        found, plan.leader, read_student_shape, **_student_description(job, plan.leader)
    )
    if scoring is None or shape is None or not scoring.windows:
        return None
    length = job.student.max_seq_len or job.teacher.max_seq_len
    cut = {"data.max_seq_len": length} if length else {}
    config = run_config.load_config("student", {**job.student.collect_settings(), **cut})
    samples = config.training.count_samples(scoring.windows)
    left = _remaining_fraction(config, done, samples)
    a_sample = min(scoring.tokens / scoring.windows, config.data.max_seq_len)
    shape_of_leader = _process_shape(plan, plan.leader)
    learning = _estimate_training(
        config, budget, shape, shape_of_leader, left * samples * a_sample, Strategy()
    )
    waited = scoring_seconds(
        scoring,
        [_process_shape(plan, process).smallest.device for process in teachers],
        seen=min(1.0, samples / scoring.windows),
        wide=job.teacher.dtype == "float32",
    )
    if learning is None or waited is None:
        return None
    in_first = min(1.0, scoring.windows / samples)  # of all its steps
    first = max(0.0, in_first - (1 - left)) / left if left else 0.0
    seconds = distillation_seconds(waited, learning.seconds, first)
    return plan_cost(shape_of_leader, seconds, _make_prices(budget))


def _estimate_training(
    config: RunConfig,
    budget: BudgetConfig,
    shape: ModelShape,
    cluster: ClusterShape,
    tokens: float,
    strategy: Strategy,
) -> Cost | None:
    method: Method = "qlora" if config.model.quantization == "nf4" else config.method
    training = config.training
    request = Request(
        shape=shape,
        cluster=cluster,
        method=method,
        rank=config.lora.lora_rank,
        frozen_a=config.lora.freeze_a,
        adapted_layers=config.lora.adapted_layers,
        whole=config.lora.modules_to_save if method != "full" else (),
        compared=config.task == "dpo",
        length=config.data.max_seq_len,
        tokens=tokens,
        prices=_make_prices(budget),
        precision=training.precision,
        recompute=training.recompute,
    )
    return plan_strategy(request, strategy, method).cost


def _remaining_fraction(config: RunConfig, done: int, samples: float) -> float:
    """Return the share of a run's samples that is left after `done` steps; a round is one."""
    after, inner = config.exchange.rounds or (done, 0)
    steps = min(done, after) + inner * max(0, done - after)
    return max(0.0, 1 - steps * config.training.batch_size / samples) if samples else 0.0


def _make_prices(budget: BudgetConfig) -> Prices:
    return Prices(hosts=budget.hosts, currency=budget.currency or "")


def _ask_process_host(
    found: Survey,
    process: ProcessPlan,
    question: Operation[P, R | None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> R | None:
    """Return what the host of a process finds in its files; None: it cannot read them."""
    try:
        return found.connections[process.host].ask(question, *args, **kwargs)
    except InvalidAnswerError:
        return None


def _corpus_description(job: DistillJob, teacher: ProcessPlan) -> dict[str, Any]:
    return {
        "model": _host_path(teacher, job.teacher.model),
        "data": [_host_path(teacher, path) for path in job.teacher.data],
        "tokenizer": _host_path(teacher, job.teacher.tokenizer),
        "logits": teacher.writable_folders["logits"],
        "max_seq_len": job.teacher.max_seq_len,
        "shard_bytes": job.teacher.shard_bytes,
        "columns": job.teacher.columns,
    }


def _student_description(job: DistillJob, process: ProcessPlan) -> dict[str, Any]:
    config = job.student.config
    if config is not None and is_shape_file(config):
        config = _host_path(process, config)
    return {
        "model": _host_path(process, job.student.model),
        "config": config,
        "tokenizer": _host_path(process, job.teacher.tokenizer),
    }


def _host_path(process: ProcessPlan, path: str | None) -> str | None:
    """Return a path of a process's host; a relative one begins at its state folder."""
    return None if path is None else path_below(process.state_folder, path)


def _list_active_hosts(plan: LaunchPlan) -> list[Host]:
    """Return the hosts of a plan with the devices of its workers alone."""
    hosts: list[Host] = []
    for host in plan.hosts:
        here = [worker for worker in plan.workers if worker.host == host.name]
        if devices := [device for worker in here for device in _planned_devices(plan, worker)]:
            hosts.append(replace(host, devices=tuple(devices)))
    return hosts


def _planned_devices(plan: LaunchPlan, process: ProcessPlan) -> list[Device]:
    there = {device.id: device for device in plan.get_host(process.host).devices or ()}
    return [
        there.get(identity) or Device("cpu", identity, threads=process.threads)
        for identity in process.devices
    ]


def _process_shape(plan: LaunchPlan, process: ProcessPlan) -> ClusterShape:
    """Return what a process of a distillation computes on, with its part of a shared device."""
    (device,) = _planned_devices(plan, process)
    if not device.is_gpu:
        device = replace(device, threads=process.threads)
    cluster = describe_cluster([replace(plan.get_host(process.host), devices=(device,))], None)
    if not device.is_gpu:
        return cluster
    alike = Counter((each.host, each.device) for each in plan.processes if each.role != "evaluator")
    part, (group,) = alike[process.host, process.device], cluster.groups
    whole = group.device
    shared = replace(
        whole, flops=whole.flops and whole.flops / part, fp32=whole.fp32 and whole.fp32 / part
    )
    return replace(cluster, groups=(replace(group, device=shared),))
