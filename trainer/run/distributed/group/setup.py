"""The common arguments of a replica group's processes, and the digests that must agree."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.config.capabilities import check_capability
from trainer.config.parallel import GroupStrategy, ParallelConfig
from trainer.config.run import RunConfig
from trainer.model.files import model_digest
from trainer.model.layout import build_layout
from trainer.model.shards import check_shards
from trainer.system.yaml_tree import parse_yaml


@dataclass(frozen=True)
class GroupSetup:
    """The replica to open."""

    config: RunConfig
    model_dir: Path
    backend: str
    strategy: GroupStrategy
    devices: tuple[str, ...]
    """By rank: a UUID, PCI address or index, or `cpu`."""
    threads: int | None
    store: str
    """The file over which the processes find each other; all have it open."""

    @property
    def parallel(self) -> ParallelConfig:
        """The strategy as a run of equal processes has it."""
        if self.strategy == "tensor":
            return ParallelConfig(tensor=len(self.devices))
        return ParallelConfig(data="fsdp" if self.strategy == "fsdp" else "ddp")

    def check_strategy(self) -> None:
        """Refuse what the strategy cannot do, before torch is imported.

        Raises:
            InputError: it does not follow a setting, or the model's sizes cannot be divided.
        """
        check_capability(self.config, self.strategy)
        config = self.config.model_copy(update={"parallel": self.parallel})
        check_shards(self.model_dir, config)

    def to_json(self) -> dict[str, Any]:
        """Return the message that `from_json` reads."""
        return {**vars(self), "config": self.config.to_yaml(), "model_dir": str(self.model_dir)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> GroupSetup:
        """Read a message back; the config is checked again."""
        config = RunConfig.model_validate(parse_yaml(body.pop("config")))
        model_dir, devices = Path(body.pop("model_dir")), tuple(body.pop("devices"))
        return cls(config=config, model_dir=model_dir, devices=devices, **body)


def compute_identity(setup: GroupSetup) -> dict[str, str]:
    """Return what must be the same in all processes of a group."""
    return {
        "config": setup.config.agreement_digest(),
        "layout": build_layout(setup.model_dir, setup.config).digest,
        "model": model_digest(setup.model_dir),
        "torch": version("torch"),
    }
