"""Tiny models, configs, batches and the replicas made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.model.layout import build_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.conftest import MakeConfig, TinyModel
    from trainer.replica.torch.replica import TorchReplica
    from trainer.replica.wgpu.gpu.device import Device
    from trainer.replica.wgpu.replica import WgpuReplica


@dataclass(frozen=True)
class Tiny:
    """Makers of model folders and of configs, and what is made of both."""

    model: TinyModel
    config: MakeConfig

    def start(
        self, folder: Path | None = None, /, device: str = "cpu", **settings: Any
    ) -> tuple[TorchReplica, np.ndarray]:
        """Return a torch replica and its weights."""
        from tests.trainer.replica.driving import start

        folder = folder or self.model()
        return start(folder, self.config(folder, **settings), device=device)

    def wgpu(
        self, device: Device, folder: Path | None = None, /, **settings: Any
    ) -> tuple[WgpuReplica, np.ndarray]:
        """Return a wgpu replica and its weights."""
        from tests.trainer.replica.driving import drawn_weights
        from trainer.replica.wgpu.replica import WgpuReplica

        folder = folder or self.model()
        config = self.config(folder, **settings)
        replica = WgpuReplica(folder, config, build_layout(folder, config), device)
        weights = drawn_weights(folder, config)
        replica.write_trainable(weights)
        return replica, weights

    def batch(self, count: int, task: str = "classify", seed: int = 0) -> list[Encoded]:
        """Return samples with lengths from 3 to 40 tokens, or pairs of them."""
        generator = np.random.default_rng(seed)
        batch: list[Encoded] = []
        for index in range(count):
            ids = generator.integers(0, 300, generator.integers(3, 41)).astype(np.int32)
            if task == "dpo":
                batch.append(self._pair(ids, generator))
            elif task == "classify":
                batch.append(Encoded(ids, index % 5))
            else:
                labels = ids.copy()
                labels[: 1 + index % 3] = IGNORED
                batch.append(Encoded(ids, labels))
        return batch

    @staticmethod
    def _pair(prompt: NDArray[np.int32], generator: np.random.Generator) -> Encoded:
        """Return two answers to a prompt."""
        rows: list[Encoded] = []
        for length in generator.integers(1, 21, 2):
            ids = np.concatenate([prompt, generator.integers(0, 300, length)]).astype(np.int32)
            places = np.arange(len(ids))
            rows.append(Encoded(ids, np.where(places < len(prompt), IGNORED, ids).astype(np.int32)))
        return replace(rows[0], rejected=rows[1])
