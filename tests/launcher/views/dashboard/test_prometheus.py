"""/metrics, read by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

from prometheus_client import parser

from launcher.views.dashboard.prometheus import format_metrics

HOSTILE = 'a"b\\c\nd{x="1"} 2 # \x1b[2J'
OVERVIEW: dict[str, Any] = {
    "runs": [
        {
            "run_id": "run-1",
            "state": "running",
            "live": True,
            "step": 10,
            "total_steps": 20,
            "loss": 0.2,
            "tokens_per_second": 1010.0,
            "workers": 3,
            "joined": 2,
            "updated": 1700000000.125,
            "budget": {"spent": 1.5, "ceiling": 4.0, "currency": "EUR"},
            "validation": {"loss": 0.75},
        },
        {
            "run_id": "run-0",
            "state": "unknown",
            "live": False,
            "step": None,
            "total_steps": None,
            "loss": float("nan"),
            "tokens_per_second": "many",
            "workers": 1,
            "joined": 0,
            "updated": None,
            "budget": None,
            "validation": None,
        },
    ],
    "hosts": [
        {
            "name": HOSTILE,
            "devices": [{"name": HOSTILE, "id": "GPU-1F", "backend": "cuda"}],
            "busy": ["run-1/worker-0"],
            "reachable": True,
            "gauges": {
                "gpu-1f": {
                    "memory_used": 1 << 30,
                    "memory_total": 1 << 34,
                    "temperature": None,
                    "load": 97,
                    "power": 210.5,
                }
            },
        }
    ],
    "remarks": ["host c does not answer"],
}


def samples(text: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text.decode()):
        assert family.documentation
        assert family.type == "gauge"
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_what_is_known_is_there_with_its_unit_and_the_rest_is_not() -> None:
    found = samples(format_metrics(OVERVIEW))
    run = {"run": "run-1"}
    assert found["motley_run_info"] == [
        ({**run, "state": "running"}, 1),
        ({"run": "run-0", "state": "unknown"}, 1),
    ]
    assert found["motley_run_live"] == [(run, 1), ({"run": "run-0"}, 0)]
    assert found["motley_run_steps_completed"] == [(run, 10)]
    assert found["motley_run_loss"] == [(run, 0.2)]
    assert found["motley_run_validation_loss"] == [(run, 0.75)]
    assert found["motley_run_tokens_per_second"] == [(run, 1010)]
    assert found["motley_run_updated_timestamp_seconds"] == [(run, 1700000000.125)]
    assert found["motley_run_spent"] == [({**run, "currency": "EUR"}, 1.5)]
    device = {"host": HOSTILE, "device": "GPU-1F", "name": HOSTILE}
    assert found["motley_device_utilization_ratio"] == [(device, 0.97)]
    assert found["motley_device_memory_used_bytes"] == [(device, 1 << 30)]
    assert found["motley_device_power_watts"] == [(device, 210.5)]
    assert "motley_device_temperature_celsius" not in found
    assert found["motley_host_processes"] == [({"host": HOSTILE}, 1)]
    assert found["motley_remarks"] == [({}, 1)]


def test_a_cluster_that_cannot_be_read_says_so() -> None:
    assert samples(format_metrics({"error": "no"})) == {"motley_remarks": [({}, 0)]}
