"""The plan.json of a run as a host keeps it; only names are taken from it.

Units write below the state folder, so a compromised worker can write any plan.json. The
inventory defines the hosts and how to reach them; the folder of a run follows from its host's state
folder and the run's id; the commands are planned again at each start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.plan import PLAN_SCHEMA, LaunchPlan, ProcessPlan, Role
from trainer.config.exchange import MIN_RING_SIZE
from trainer.system.commandline.run_id import RUN_ID
from trainer.system.untrusted_data import UnixTime, parse_json, validate_data

MOST = 4 << 20
"""Bytes that a plan.json may have; one of a thousand workers has about 1 MB."""

_NAMES = r"^((worker|teacher|evaluator)-[0-9]{1,5}|coordinator|student)$"
_Name = Annotated[str, Field(pattern=_NAMES)]
_HostName = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f-\x9f]+$", max_length=253)]
_Text = Annotated[str, Field(max_length=4096)]
_Number = Annotated[int, Field(ge=0, le=1 << 20)]


@dataclass(frozen=True)
class PlanRecord:
    """The used part of a plan.json."""

    plan: LaunchPlan
    """Without commands, environments, folders and certificates' names. Its hosts are names: local
    ones that the plan calls so, and others that cannot be reached."""
    started: float


class _Process(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: _Name
    role: Role
    rank: _Number | None = None
    local_rank: _Number | None = None
    host: _HostName
    device: _Text
    members: Annotated[tuple[_Text, ...], Field(max_length=1024)] = ()
    strategy: _Text = ""
    backend: _Text
    threads: _Number | None
    address: _Text = ""
    report_file: _Text = ""

    @model_validator(mode="after")
    def _check_process_name(self) -> Self:
        kind, _, number = self.name.partition("-")
        if kind != self.role or (kind == "worker") != (self.rank is not None):
            raise ValueError(f"{self.name} is not a name of a {self.role}")
        if self.rank is not None and int(number) != self.rank:
            raise ValueError(f"{self.name} has the rank {self.rank}")
        return self

    def plan(self) -> ProcessPlan:
        return ProcessPlan(**self.model_dump(), argv=(), env={}, folder="")


class _Device(BaseModel):
    model_config = ConfigDict(frozen=True)

    backend: Literal["cuda", "wgpu", "cpu"]
    id: _Text
    name: _Text = ""
    pci: _Text = ""


class _Host(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: _HostName
    connection: Literal["local", "ssh", "none"] = "none"
    devices: Annotated[tuple[_Device, ...], Field(max_length=1024)] | None = None

    def build_host(self) -> Host:
        devices = tuple(Device(**device.model_dump()) for device in self.devices or ())
        way = "local" if self.connection == "local" else "none"
        return Host(name=self.name, connection=way, devices=devices)


class _Plan(BaseModel):
    model_config = ConfigDict(frozen=True)

    schema_name: Literal["motley.plan/2"] = Field(alias="schema")
    run_id: Annotated[str, Field(pattern=f"^{RUN_ID}$")]
    output: _Text
    hosts: Annotated[tuple[_Host, ...], Field(min_length=1, max_length=4096)]
    processes: Annotated[tuple[_Process, ...], Field(min_length=1, max_length=65536)]
    started: UnixTime

    @model_validator(mode="after")
    def _check_plan_consistency(self) -> Self:
        hosts = {host.name for host in self.hosts}
        names = [process.name for process in self.processes]
        if len(hosts) < len(self.hosts) or len(set(names)) < len(names):
            raise ValueError("two hosts or processes have the same name")
        # A ring's leader is its rank 0.
        ring = [process.rank for process in self.processes] == list(range(len(names)))
        ring = ring and len(names) >= MIN_RING_SIZE
        if self.processes[0].role not in ("coordinator", "student") and not ring:
            raise ValueError(f"{names[0]} cannot lead a run")
        for process in self.processes:
            if process.host not in hosts:
                raise ValueError(
                    f"{process.name} is on {process.host}, which is not one of its hosts"
                )
        return self


def read_record(data: bytes, run_id: str) -> PlanRecord:
    """Read the plan.json that a host keeps for a run.

    Raises:
        ValueError: it is none, or of another run.
    """
    if len(data) >= MOST:
        raise ValueError(f"longer than {MOST} bytes")
    found = validate_data(_Plan, parse_json(data, PLAN_SCHEMA), PLAN_SCHEMA)
    if found.run_id != run_id:
        raise ValueError(f"it belongs to another run, {found.run_id}")
    plan = LaunchPlan(
        run_id=run_id,
        output=found.output,
        hosts=tuple(host.build_host() for host in found.hosts),
        processes=tuple(process.plan() for process in found.processes),
    )
    return PlanRecord(plan, found.started)
