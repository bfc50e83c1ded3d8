"""The overview as Prometheus text (exposition format 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

_Labels = Mapping[str, object]
_Sample = tuple[_Labels, float]
_HELP = {
    "run_info": "The state of a run, as a label; always 1.",
    "run_live": "Whether a process of the run is running.",
    "run_steps_completed": "Steps of the run that are committed.",
    "run_steps_planned": "Steps that the run has in all.",
    "run_loss": "Loss of the last step.",
    "run_validation_loss": "Loss of the last validation.",
    "run_tokens_per_second": "Rate of the last step.",
    "run_workers_planned": "Workers that the run began with.",
    "run_workers_joined": "Workers that take part.",
    "run_updated_timestamp_seconds": "When the run last wrote its status.",
    "run_spent": "Cost of the run so far, in the currency of its budget.",
    "run_budget": "Ceiling of the run's cost, in that currency.",
    "host_reachable": "Whether the host answers.",
    "host_processes": "Processes of runs on the host.",
    "device_memory_used_bytes": "Memory of the device in use.",
    "device_memory_bytes": "Memory of the device.",
    "device_utilization_ratio": "Use of the device, from 0 to 1.",
    "device_power_watts": "Power that the device draws.",
    "device_temperature_celsius": "Temperature of the device.",
    "remarks": "Errors of reading, such as hosts that do not answer.",
}
"""Every metric, without `motley_`, and what it means; all are gauges."""


class _Overview(Collector):
    """The overview as a collector of gauges."""

    def __init__(self, overview: Mapping[str, Any]) -> None:
        self._overview = overview

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric that has a value; what is not known is left out."""
        found: dict[str, list[_Sample]] = {name: [] for name in _HELP}
        for name, labels, value in (
            *_run_samples(self._overview),
            *_host_samples(self._overview),
        ):
            if isinstance(value, int | float) and math.isfinite(value):
                found[name].append((labels, value))
        for name, samples in found.items():
            if samples:
                family = GaugeMetricFamily(f"motley_{name}", _HELP[name], labels=[*samples[0][0]])
                for labels, value in samples:
                    family.add_metric([str(each) for each in labels.values()], value)
                yield family


def format_metrics(overview: Mapping[str, Any]) -> bytes:
    """Return the metrics of the dashboard's overview; what is not known is left out."""
    return generate_latest(_Overview(overview))


def _run_samples(overview: Mapping[str, Any]) -> Iterator[tuple[str, _Labels, object]]:
    for run in overview.get("runs", ()):
        labels = {"run": run["run_id"]}
        yield "run_info", {**labels, "state": run["state"]}, 1
        yield "run_live", labels, run["live"]
        yield "run_steps_completed", labels, run["step"]
        yield "run_steps_planned", labels, run["total_steps"]
        yield "run_loss", labels, run["loss"]
        validation: Mapping[str, Any] = run["validation"] or {}
        yield "run_validation_loss", labels, validation.get("loss")
        yield "run_tokens_per_second", labels, run["tokens_per_second"]
        yield "run_workers_planned", labels, run["workers"]
        yield "run_workers_joined", labels, run["joined"]
        yield "run_updated_timestamp_seconds", labels, run["updated"]
        budget: Mapping[str, Any] = run["budget"] or {}
        money = {**labels, "currency": budget.get("currency") or ""}
        yield "run_spent", money, budget.get("spent")
        yield "run_budget", money, budget.get("ceiling")


def _host_samples(overview: Mapping[str, Any]) -> Iterator[tuple[str, _Labels, object]]:
    yield "remarks", {}, len(overview.get("remarks", ()))
    for host in overview.get("hosts", ()):
        yield "host_reachable", {"host": host["name"]}, host["reachable"]
        yield "host_processes", {"host": host["name"]}, len(host["busy"])
        for device in host["devices"]:
            gauge = host["gauges"].get(device["id"].lower(), {})
            labels = {"host": host["name"], "device": device["id"], "name": device["name"] or ""}
            load = gauge.get("load")
            yield "device_memory_used_bytes", labels, gauge.get("memory_used")
            yield "device_memory_bytes", labels, gauge.get("memory_total")
            yield "device_utilization_ratio", labels, None if load is None else load / 100
            yield "device_power_watts", labels, gauge.get("power")
            yield "device_temperature_celsius", labels, gauge.get("temperature")
