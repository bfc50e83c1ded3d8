"""Sharded checkpoints: another strategy and another number of ranks go on with the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file

from trainer.system.errors import InputError, StorageError

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

pytestmark = pytest.mark.long

CRASHING = "tests.trainer.run.distributed.crash_while_saving:die_at_every_place"
HERE = "tests.trainer.run.distributed.test_sharded_checkpoint"
DDP = {"parallel.data": "ddp"}
TENSOR = {"parallel.data": "fsdp", "parallel.tensor": 2, "parallel.sequence": True}
FSDP = {"parallel.data": "fsdp"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"lora.lora_rank": 3},
    "qlora": {"lora.lora_rank": 4, "model.quantization": "nf4"},
}


SECOND = {"full": FSDP, "lora": DDP, "qlora": TENSOR}


def run(
    model: str, output: str, settings: dict[str, Any], steps: int, save_at: list[int]
) -> dict[str, Any]:
    """Resume if there is something to, and train."""
    from tests.trainer.run.distributed.small_training import Training

    training = Training(model, output, settings)
    began = training.resume()
    return {"began": began, "losses": training.train(steps, tuple(save_at))}


@pytest.mark.parametrize("method", METHODS)
def test_four_ranks_are_resumed_by_two_and_by_one_with_another_strategy(
    ranks: Ranks, drawn_model: DrawnModel, tmp_path: Path, method: str
) -> None:
    model, settings = drawn_model("qwen3"), METHODS[method]
    never_stopped = ranks.run(
        f"{HERE}:run", model, str(tmp_path / "a"), settings | DDP, 6, [], world=1
    )[0]["losses"]
    output = str(tmp_path / "b")
    # FSDP2 with tensor parallelism; then one of them alone; then one process.
    first = ranks.run(f"{HERE}:run", model, output, settings | TENSOR, 2, [2], world=4)
    second = ranks.run(f"{HERE}:run", model, output, settings | SECOND[method], 2, [4], world=2)
    third = ranks.run(f"{HERE}:run", model, output, settings | DDP, 2, [], world=1)
    assert [found[0]["began"] for found in (first, second, third)] == [None, 2, 4]
    losses = [loss for found in (first, second, third) for loss in found[0]["losses"]]
    assert losses == pytest.approx(never_stopped, abs=1e-5)
    assert losses[0] - losses[4] > 0.001, "nothing was learned, and so nothing compared"


def file_bytes(model: str, output: str, settings: dict[str, Any]) -> list[str]:
    """Save while the weights move on at once; return what each rank's file holds."""
    from tests.trainer.run.distributed.small_training import Training, progress

    training = Training(model, output, settings)
    training.train(1)
    training = Training(model, output, settings)
    training.checkpoints.save(progress(1))
    for parameter in training.replica.parameters.values():
        parameter.data.fill_(7.0)
    training.checkpoints.close()
    return sorted(path.name for path in Path(output, "step-000001").iterdir())


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_share_the_writing_of_what_was_there_when_the_save_began(
    ranks: Ranks, drawn_model: DrawnModel, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    arguments = drawn_model("qwen3"), str(tmp_path), METHODS["full"] | strategy
    names = ranks.run(f"{HERE}:file_bytes", *arguments)[0]
    shards = [name for name in names if name.endswith(".safetensors")]
    assert names == sorted(["manifest.json", "run.json", *shards])
    assert len(shards) == 2
    sizes = [(tmp_path / "step-000001" / name).stat().st_size for name in shards]
    assert max(sizes) < 1.2 * min(sizes), "no rank writes all of it"
    for name in shards:
        for key, values in load_file(tmp_path / "step-000001" / name).items():
            assert not (values == 7.0).all(), f"{key} moved after the save began"


def damaged(model: str, output: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Damage the newest of three checkpoints, and resume."""
    from tests.trainer.run.distributed.small_training import Training

    training = Training(model, output, settings)
    training.train(3, (1, 2, 3))
    kept = sorted(path.name for path in Path(output).glob("step-*"))
    training = Training(model, output, settings)
    if training.replica.local_samples(2)[0] == 0:
        shard = sorted(Path(output, "step-000003").glob("shard-00002*"))[0]
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    training = Training(model, output, settings)
    resumed = training.checkpoints.restore("run")
    assert resumed is not None
    other = training.checkpoints.restore("other")
    training.checkpoints._layout = "another"
    with pytest.raises(InputError, match="belongs to another model or trainable set"):
        training.checkpoints.restore("run")
    training.checkpoints.close()
    return {
        "kept": kept,
        "step": resumed.progress.step,
        "rejected": resumed.rejected,
        "other": other,
    }


def test_a_damaged_one_is_left_out_by_all_ranks(
    ranks: Ranks, drawn_model: DrawnModel, tmp_path: Path
) -> None:
    found = ranks.run(f"{HERE}:damaged", drawn_model("qwen3"), str(tmp_path), METHODS["lora"] | DDP)
    assert found[0] == found[1]
    assert found[0]["kept"] == ["step-000002", "step-000003"], "keep_last is 2"
    assert found[0]["step"] == 2
    assert found[0]["other"] is None
    [rejected] = found[0]["rejected"]
    assert "shard-00002" in rejected
    assert "does not match the manifest" in rejected


def unwritable(model: str, output: str, settings: dict[str, Any]) -> list[str]:
    """Fail to write on rank 1, then save again."""
    import torch.distributed as dist

    from tests.trainer.run.distributed.small_training import Training, progress
    from trainer.run.distributed import rank_file

    training = Training(model, output, settings)
    training.train(1, (1,))
    training = Training(model, output, settings)
    write = rank_file.RankWriter.write_data

    def refuse(self: Any, *arguments: Any) -> Any:
        if self._shard == 2:
            raise OSError(28, "No space left on device")
        return write(self, *arguments)

    rank_file.RankWriter.write_data = refuse  # type: ignore[method-assign]  # the fault
    messages: list[str] = []
    try:
        training.checkpoints.save(progress(2))
        training.checkpoints.wait()
    except StorageError as error:
        messages.append(str(error))
    finally:
        rank_file.RankWriter.write_data = write  # type: ignore[method-assign]  # the fault
    names = sorted(path.name for path in Path(output).iterdir())
    dist.barrier()
    training.checkpoints.save(progress(2))
    training.checkpoints.close()
    return [*messages, *names]


def test_a_full_disk_of_one_rank_is_an_error_of_all_and_leaves_nothing(
    ranks: Ranks, drawn_model: DrawnModel, tmp_path: Path
) -> None:
    found = ranks.run(
        f"{HERE}:unwritable", drawn_model("qwen3"), str(tmp_path), METHODS["lora"] | FSDP
    )
    for message, *names in found:
        assert "step-000002: checkpoint not saved: rank 1 on " in message
        assert message.endswith("No space left on device; older ones are intact")
        assert names == ["step-000001"]
    assert (tmp_path / "step-000002" / "manifest.json").exists()


def test_parts_that_several_ranks_hold_are_spread_over_them() -> None:
    from trainer.run.distributed.rank_file import choose_writers  # here alone: it takes a second

    whole, left, right = ([4], [0], 16), ([2], [0], 8), ([2], [2], 8)
    assert choose_writers([{"a": whole, "b": whole}] * 2) == [["a"], ["b"]]
    assert choose_writers([{"a": left}, {"a": right}]) == [["a"], ["a"]]
    assert choose_writers([{"a": left, "b": whole}, {"a": left}]) == [["a", "b"], []]
    assert choose_writers([{"a": ([0], [4], 0)}, {"a": whole}]) == [[], ["a"]]


def test_killed_at_every_stage_of_a_save_the_previous_one_loads(
    ranks: Ranks, tmp_path: Path
) -> None:
    (results,) = ranks.run(CRASHING, str(tmp_path), world=0, patience=280)
    assert len(results) > 12, "a rank's file, and every write, sync and rename, is a place to die"
    assert [result["exit_code"] for result in results] == [-9] * (len(results) - 1) + [0]
    steps: list[int] = []
    for result in results:
        (step, values), other = result["found"]
        assert other == [step, values], result
        assert values == [step], f"not the values of one save: {result}"
        assert result["hidden"] == [], result
        steps.append(step)
    assert steps == sorted(steps), "once the new one is visible it stays"
    assert (steps[0], steps[-1]) == (1, 2)
