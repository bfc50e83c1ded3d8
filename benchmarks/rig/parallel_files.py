"""Resident memory of ranks while they load a model, write a checkpoint and resume from it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rig.parallel_models import STRATEGIES, meshes, settings, write_model
from rig.report import Ratio, Report
from rig.resident import Peak, own_bytes

WIDE = {"hidden_size": 768, "head_dim": 128, "intermediate_size": 2048, "num_hidden_layers": 12}


def weigh_files(folder: Path, _rounds: int) -> dict[str, Any]:
    """Return by strategy the bytes above those before: at load, in both ways to save, to resume."""
    import torch

    from trainer.config.run import load
    from trainer.model.layout import build_layout
    from trainer.replica.torch.parallel.replica import ParallelReplica
    from trainer.run.distributed.gathered import GatheredCheckpoints
    from trainer.run.distributed.optimizer import ParallelAdamW

    path, found = write_model(folder, **WIDE), {}
    for strategy, mesh in meshes().items():
        config = load(None, settings(path) | STRATEGIES[strategy])
        layout = build_layout(path, config)
        before = own_bytes()
        with Peak() as loading:
            replica = ParallelReplica(path, config, layout, mesh, torch.device("cpu"))
        sizes = {"weights": 4 * layout.size, "kept": own_bytes() - before}
        sizes["load"] = loading.bytes - before
        optimizer = ParallelAdamW(config.optimizer, layout, replica.parameters, replica.copies_of)
        for step, way in enumerate(("stream", "save"), start=1):
            recorder = writer(folder / strategy, config, layout, path, step)
            gathered: Any = GatheredCheckpoints(replica, optimizer, recorder, 0)
            before = own_bytes()
            with Peak() as saving:
                getattr(gathered, way)(step, None)
                if recorder is not None:
                    recorder.join()
            sizes[way] = saving.bytes - before
        stored = saved(folder / strategy, config, layout, path)
        before = own_bytes()
        with Peak() as resuming:
            optimizer.restore(stored, step)
        sizes["resume"] = resuming.bytes - before
        found[strategy] = sizes
        del replica, optimizer, gathered
    return found


def saved(folder: Path, config: Any, layout: Any, model: Path) -> Any:
    """Return on rank 0 the state that it resumes from."""
    import torch.distributed as dist

    from trainer.checkpoint.store import CheckpointStore

    if dist.get_rank():
        return None
    found = CheckpointStore(folder, layout, config, model).reopen("run")
    assert found is not None
    return found.stored


def writer(folder: Path, config: Any, layout: Any, model: Path, step: int) -> Any:
    """Return on rank 0 what writes a checkpoint in a thread, as the record of a run does."""
    import torch.distributed as dist

    from trainer.checkpoint.store import CheckpointStore, RunProgress

    if dist.get_rank():
        return None
    store = CheckpointStore(folder, layout, config, model)
    progress = RunProgress("run", step, 0, 0, 0, 0, {})
    threads: list[threading.Thread] = []

    def save(wanted: Any) -> None:
        threads.append(threading.Thread(target=store.save, args=(wanted.snapshot, progress)))
        threads[-1].start()

    return SimpleNamespace(save=save, join=lambda: threads[-1].join())


def report_files(report: Report, ranks: list[Any]) -> None:
    """Report each strategy's peaks on rank 0."""
    for strategy in STRATEGIES:
        sizes = ranks[0][strategy]
        load = Ratio(f"{strategy}: peak at load", sizes["load"] / sizes["weights"], "the weights")
        report.add(load, **sizes)
        save = Ratio(
            f"{strategy}: streamed save", sizes["stream"] / sizes["weights"], "the weights"
        )
        report.add(save, gathered_first=round(sizes["save"] / sizes["weights"], 3))
        resume = sizes["resume"] / sizes["weights"]
        report.add(Ratio(f"{strategy}: resume", resume, "the weights"))
