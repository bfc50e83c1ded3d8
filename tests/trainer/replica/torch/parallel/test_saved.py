"""What each strategy trains is saved as the same files, which PEFT and transformers load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.replica.torch.parallel.one_process import parallel_replica, run_config, samples
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.store import CheckpointStore, RunProgress
from trainer.checkpoint.trained_model import load_trained
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import TrainState
from trainer.replica.torch.batch import IGNORED

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.replica.torch.parallel.test_saved"
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.data": "ddp"},
    "fsdp": {"parallel.data": "fsdp"},
    "tp": {"parallel.tensor": 2},
    "tp-sp": {"parallel.tensor": 2, "parallel.sequence": True},
    "pp": {"parallel.pipeline.stages": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora.lora_rank": 4},
    "full": {"method": "full"},
}
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def trained(folder: str, settings: dict[str, Any], output: str) -> dict[str, Any]:
    """Train two steps, save on rank 0, and return the loss and the memory of the weights."""
    import torch

    from trainer.replica.torch.parallel import flat_vector

    replica, config = parallel_replica(folder, settings)
    batch = samples(config, 6, 300)
    mine = [batch[index] for index in replica.local_samples(len(batch))]
    for _ in range(2):
        replica.accumulate(mine)
        with torch.no_grad():
            for parameter in replica.parameters.values():
                assert parameter.grad is not None
                flat_vector.local_part(parameter).sub_(
                    0.05 * flat_vector.local_part(parameter.grad)
                )
    result = replica.evaluate(mine)
    weights = replica.gather_parameters(replica.parameters)
    if weights is not None:
        layout = build_layout(Path(folder), config)
        zeros = np.zeros_like(weights)
        store = CheckpointStore(Path(output), layout, config, Path(folder))
        progress = RunProgress("run", 2, 0, 6, 0, 0, config.model_dump(mode="json"))
        store.save(TrainState(weights, zeros, zeros.copy(), step=2).take_snapshot(), progress)
    kept = {
        storage.data_ptr(): storage.nbytes()
        for storage in (
            flat_vector.local_part(part).untyped_storage() for part in replica.parameters.values()
        )
    }
    return {"loss": result.loss_sum / result.weight, "bytes": sum(kept.values())}


@pytest.mark.parametrize("method", METHODS)
def test_every_strategy_saves_the_same(
    ranks: Ranks, drawn_model: DrawnModel, tmp_path: Path, method: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = drawn_model("qwen3")
    settings = METHODS[method]
    batch = samples(run_config(folder, settings), 6, 300)
    ids = torch.from_numpy(batch[0].input_ids).long()[None]
    logits: dict[str, Any] = {}
    kept: dict[str, int] = {}
    for name, strategy in STRATEGIES.items():
        output = tmp_path / name
        arguments = folder, settings | strategy, str(output)
        (found, _) = ranks.run(f"{HERE}:trained", *arguments)
        kept[name] = found["bytes"]
        read = load_trained(output)
        if method == "lora":
            from peft import PeftModel

            base = AutoModelForCausalLM.from_pretrained(folder)
            model = PeftModel.from_pretrained(base, str(read.path)).eval()
            whole = merge_adapter(open_adapter(output)[0], tmp_path / f"{name}-merged")
        else:
            model = AutoModelForCausalLM.from_pretrained(read.path).eval()
            whole = read.path
        merged = AutoModelForCausalLM.from_pretrained(whole).eval()
        with torch.no_grad():
            logits[name] = model(ids).logits
            torch.testing.assert_close(merged(ids).logits, logits[name], atol=1e-5, rtol=1e-5)
            total, weight = 0.0, 0
            for sample in batch:
                row, labels = (
                    torch.from_numpy(np.asarray(part)).long()[None]
                    for part in (sample.input_ids, sample.labels)
                )
                targets = int((labels[:, 1:] != IGNORED).sum())
                total += float(model(row, labels=labels).loss) * targets
                weight += targets
        assert found["loss"] == pytest.approx(total / weight, rel=1e-5)
        torch.testing.assert_close(logits[name], logits["ddp"], atol=1e-5, rtol=1e-5)
    assert all(kept[name] < 0.8 * kept["ddp"] for name in STRATEGIES if name != "ddp"), kept
