"""A few hundred weights with a layout, a config and a state: enough to save and to break."""

from pathlib import Path

import numpy as np

from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.config.run import RunConfig
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import TrainState

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def tiny_layout(width: int = 16) -> GradientLayout:
    first = TensorSlot(f"{PREFIX}.lora_A.weight", (4, width), 0)
    second = TensorSlot(f"{PREFIX}.lora_B.weight", (width, 4), first.stop)
    head = TensorSlot("base_model.model.score.weight", (3, width), second.stop)
    return GradientLayout(
        (
            Block(0, "layers.0", 0, second.stop, (first, second)),
            Block(1, "head", head.start, head.stop, (head,)),
        ),
        num_layers=1,
    )


def tiny_config(keep_last: int = 2, **changes: object) -> RunConfig:
    tree = {
        "model": {"path": "base"},
        "data": {"train": "train.jsonl"},
        "num_classes": 3,
        "lora": {"lora_rank": 4, "lora_alpha": 8, "target_modules": ("q_proj",)},
        "checkpoint": {"keep_last": keep_last},
        **changes,
    }
    return RunConfig.model_validate(tree)


def tiny_state(step: int, layout: GradientLayout | None = None) -> TrainState:
    size = (layout or tiny_layout()).size
    draw = np.random.default_rng(step)
    arrays = [draw.standard_normal(size).astype(np.float32) for _ in range(3)]
    weights, first, second = arrays
    return TrainState(weights, first, np.abs(second), step=step)


def tiny_progress(step: int, run_id: str = "run-a") -> RunProgress:
    return RunProgress(
        run_id=run_id,
        step=step,
        epoch=step // 50,
        epoch_samples=16 * (step % 50),
        generation=3,
        seed=7,
        config=tiny_config().model_dump(mode="json"),
        data_digest="d" * 64,
    )


def make_store(folder: Path, **options) -> CheckpointStore:
    return CheckpointStore(folder, tiny_layout(), tiny_config(**options), Path("base"))


def save(
    store: CheckpointStore, step: int, metric: float | None = None, run_id: str = "run-a"
) -> Path:
    return store.save(tiny_state(step).take_snapshot(), tiny_progress(step, run_id), metric)
