"""Filters of role verify: a host's answers as one report, and all reports as one table."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from launcher.agent.archive import agent_script
from launcher.inventory.facts.devices import Detection
from launcher.inventory.facts.vulkan import select_usable
from trainer.system.untrusted_data import validate_data

SCHEMA = "motley.verify/1"
COLUMNS = ("host", "system", "python", "motley", "devices", "share", "link", "clock")


def report(base: dict[str, Any], **answers: Any) -> dict[str, Any]:
    """Registered answers of one host -> its report (motley.verify/1), JSON values only."""
    found = _read_detection(answers["devices"])
    usable = select_usable(found.adapters, answers["allow_software"])
    python = [one.get("stdout", "").split()[-1] for one in answers["pythons"] if one.get("stdout")]
    installed = _json(answers["installed"]) if answers["installed"] else {}
    return {
        "schema": SCHEMA,
        **base,
        "driver": _first(answers["driver"]) if answers["driver"].get("rc") == 0 else "",
        "cards": [asdict(card) for card in found.cards],
        "devices": [asdict(device) for device in found.devices],
        "vulkan": [asdict(adapter) for adapter in found.adapters],
        "usable_vulkan": [asdict(adapter) for adapter in usable],
        "problems": [*found.problems, *found.vulkan_problems],
        "python": python[0] if python else "",
        "wheel": {key: installed.get(key) for key in ("version", "sha256")} if installed else None,
        "share": _measured(answers["share"]),
        "link": _link(answers),
        "clock": {
            "offset_s": answers["clock"].get("offset"),
            "uncertainty_s": answers["clock"].get("uncertainty"),
            "synchronized": _first(answers["synchronized"]) == "yes",
        },
    }


def table(reports: list[dict[str, Any]], hosts: list[str]) -> list[str]:
    """Reports -> the lines of a table in the inventory's order; a host without one is named."""
    by_host = {one["host"]: one for one in reports}
    rows: list[tuple[str, ...]] = [COLUMNS]
    notes: list[str] = []
    for host in hosts:
        if host not in by_host:
            rows.append((host, "no report: it failed or was not reached", "", "", "", "", "", ""))
            continue
        one = by_host[host]
        devices = _devices(one)
        share, link = _share_cell(one["share"]), _link_cell(one["link"])
        known = (host, one["system"], one["python"] or "-", _wheel_cell(one["wheel"]))
        rows.append((*known, devices[0], share, link, _clock_cell(one["clock"])))
        rows += [("", "", "", "", device, "", "", "") for device in devices[1:]]
        problems = [*one["problems"], _share_line(one["share"]), one["link"].get("error")]
        notes += [f"{host}: {problem}" for problem in problems if problem]
    wheels = {one["wheel"]["sha256"] for one in reports if one["wheel"]}
    if len(wheels) > 1:
        notes.append("the hosts do not have the same wheel: launch cluster push")
    # A long cell of a host that failed must not widen the table of those that did not.
    widths = [max(len(row[i]) for row in rows if row[2] or not row[0]) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:], *notes]


def _devices(one: dict[str, Any]) -> list[str]:
    driver = f" driver {one['driver']}" if one["driver"] else ""
    lines = [
        f"cuda {d['pci']} {d['name']} {_size(d['memory'])}{driver}"
        for d in one["devices"]
        if d["backend"] == "cuda"
    ]
    lines += [
        f"vulkan {d['pci'] or d['kind']} {d['name']}, {d['driver']}" for d in one["usable_vulkan"]
    ]
    return [" ".join(line.split()) for line in lines] or ["cpu only" if one["devices"] else "-"]


def _size(memory: int | None) -> str:
    return f"{memory / (1 << 30):.0f} GiB" if memory else ""


def _share_cell(share: dict[str, Any]) -> str:
    return str(share.get("status", "-"))


def _share_line(share: dict[str, Any]) -> str:
    """Return what the check of the share found, or what kept it from running."""
    found = "; ".join(share[key] for key in ("detail", "remedy") if share.get(key))
    return f"share {found}" if found else str(share.get("error", ""))


def _link_cell(link: dict[str, Any]) -> str:
    if "to_mbit_s" in link:
        there, back = link["to_mbit_s"], link["from_mbit_s"]
        return f"{there}/{back} Mbit/s {link['round_trip_ms']:.1f} ms"
    return link.get("note", "-")


def _clock_cell(clock: dict[str, Any]) -> str:
    if clock["offset_s"] is None:
        return "-"
    kept = "" if clock["synchronized"] else " not kept"
    return f"{clock['offset_s'] * 1000:+.0f} +- {clock['uncertainty_s'] * 1000:.0f} ms{kept}"


def _wheel_cell(wheel: dict[str, Any] | None) -> str:
    return f"{wheel['version']} {str(wheel['sha256'])[:12]}" if wheel else "-"


def _link(answers: dict[str, Any]) -> dict[str, Any]:
    if answers["links_skipped"]:
        return {"note": answers["links_skipped"]}
    if answers["is_coordinator"]:
        return {"note": "coordinator"}
    found = _measured(answers["link"])
    if found.get("upload_rate") and found.get("download_rate"):
        return {
            "round_trip_ms": round(1000 * found["round_trip"], 3),
            "to_mbit_s": round(found["upload_rate"] / 1e6),
            "from_mbit_s": round(found["download_rate"] / 1e6),
        }
    return {"error": found.get("error") or f"link {found.get('stage')}: {found.get('detail')}"}


def _read_detection(result: dict[str, Any]) -> Detection:
    """Return a host's devices; what kept it from reporting them is a problem."""
    measured = _measured(result)
    if "error" in measured:
        return Detection((), (f"devices: {measured['error']}",))
    try:
        return validate_data(Detection, measured, "devices", least=0)
    except ValueError as error:
        return Detection((), (str(error),))


def _measured(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the agent's code printed, or what kept it from printing."""
    measured = _json(result.get("stdout", ""))
    if measured:
        return measured
    lines = f"{result.get('stderr', '')}\n{result.get('msg', '')}".split("\n")
    return {"error": next((line.strip() for line in lines if line.strip()), "no answer")}


def _first(result: dict[str, Any]) -> str:
    return next(iter(result.get("stdout", "").splitlines()), "").strip()


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class FilterModule:
    """What Ansible asks a filter plugin for."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by the names that tasks use."""
        return {
            "motley_verify_agent": lambda _nothing: agent_script(),
            "motley_verify_report": report,
            "motley_verify_table": table,
        }
