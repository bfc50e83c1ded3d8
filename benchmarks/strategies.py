"""Tokens a second, MFU and peak memory of every strategy, on all GPUs of this machine.

    python benchmarks/strategies.py [--shape tiny|0.6b|4b] [--method lora] [--rows 4]
                                    [--tokens 2048] [--steps 5] [--strategies ddp fsdp ...]
                                    [--models DIR] [--processes N]

One process a GPU, over NCCL, so one process with one GPU, on which only ddp and fsdp are possible;
without a GPU two processes on the CPU over gloo, which shows that the program runs and nothing
else. DIR keeps the model for the next call, as in one_card.py. The models have the shapes of
Qwen3-0.6B and Qwen3-4B and random weights in bf16. A step is forward, backward, every reduction and
AdamW, with recomputation on GPUs. MFU is the share of the cards' peak that the operations of
forward and backward are, those of recomputation not counted (PaLM, arXiv 2204.02311, appendix B);
peaks are those of `launch plan`. Memory is the most that torch's allocator held on any card, and
the plan for it. A strategy that a shape or the number of cards does not allow is named, and so is
one that fails. JSON: benchmarks/results/strategies-SHAPE-METHOD.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig.model_folders import SHAPES, model_folder
from rig.report import Ratio, Report
from rig.training_step import METHODS, flops_utilization, random_rows, step_config

from trainer.system.errors import InputError

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.data": "ddp"},
    "fsdp": {"parallel.data": "fsdp"},
    "tp": {"parallel.tensor": 0},  # all processes
    "tp-sp": {"parallel.tensor": 0, "parallel.sequence": True},
    **{
        f"pp-{name}": {"parallel.pipeline.stages": 0, "parallel.pipeline.schedule": name}
        for name in ("gpipe", "1f1b", "interleaved", "zbv")
    },
    "fsdp-x-tp": {"parallel.data": "fsdp", "parallel.tensor": 2},
    "pp-x-ddp": {"parallel.pipeline.stages": 2},
}
DEADLINE = 1800.0
"""Seconds for a strategy, with its loading."""


def main() -> int:
    """Measure each strategy in processes of its own, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--method", choices=METHODS, default="lora")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--models", type=Path, help="where model folders are, or come")
    parser.add_argument("--processes", type=int, help="default: one a GPU; without any two")
    parser.add_argument("--rank", nargs=4, metavar=("RANK", "WORLD", "MODEL", "FOLDER"))
    options = parser.parse_args()
    if options.rank:
        rank, world, model, folder = options.rank
        be_rank(int(rank), int(world), Path(model), Path(folder), options)
        return 0
    import torch

    cards = torch.cuda.device_count()
    world = options.processes or cards or 2
    if world < 1 or 0 < cards < world:
        parser.error(f"--processes {world}: a process a GPU, of which there are {cards}")
    report = Report(f"strategies-{options.shape}-{options.method}")
    with model_folder(options.models, options.shape) as folder:
        for name in options.strategies:
            found = measure(name, world, folder, options)
            if isinstance(found, str):
                print(f"{name}: {found}", flush=True)
                report.figures.append({"strategy": name, "error": found})
                continue
            mfu = "unknown" if found["mfu"] is None else f"{100 * found['mfu']:.1f} %"
            held = "unknown" if found["peak"] is None else f"{found['peak'] / 2**30:.2f} GiB"
            print(
                f"{name}: {found['tokens_per_second']:,.0f} tokens/s, MFU {mfu}, peak {held},"
                f" plan {found['plan'] / 2**30:.2f} GiB"
            )
            if found["peak"] is None:
                report.figures.append({"strategy": name, **found})
            else:
                against = Ratio(f"{name}: memory", found["peak"] / found["plan"], "the plan")
                report.add(against, **found)
    return report.write()


def run_config(name: str, world: int, folder: Path, options: argparse.Namespace) -> Any:
    """Return the run config of a strategy; 0 among its settings is all processes.

    Raises:
        InputError: the strategy is not possible.
    """
    strategy = {key: world if value == 0 else value for key, value in STRATEGIES[name].items()}
    return step_config(folder, options.method, options.rows, options.tokens, strategy)


def measure(name: str, world: int, folder: Path, options: argparse.Namespace) -> Any:
    """Return the figures of a strategy, or why there are none."""
    from trainer.model.layout import build_layout
    from trainer.model.shards import check_shards

    least = 4 if "-x-" in name else 1 if name in ("ddp", "fsdp") else 2
    if world < least:
        return f"needs {least} processes"
    try:
        config = run_config(name, world, folder, options)
        config.parallel.count_copies(world)
        check_shards(folder, config)
        config.parallel.pipeline.check_layers(build_layout(folder, config).num_layers)
    except InputError as error:
        return str(error)
    with tempfile.TemporaryDirectory(prefix="motley-strategies-") as ranks:
        found = run_ranks(name, world, folder, Path(ranks), options)
    return found if isinstance(found, str) else with_rates(found, config, world, folder, options)


def run_ranks(
    name: str, world: int, folder: Path, ranks: Path, options: argparse.Namespace
) -> list[Any] | str:
    """Return what each rank found, or why there is nothing."""
    words = [*(f"--{key}={getattr(options, key)}" for key in ("shape", "method", "rows", "tokens"))]
    command = [sys.executable, __file__, *words, f"--steps={options.steps}", "--strategies", name]
    running: list[subprocess.Popen[bytes]] = []
    for rank in range(world):
        with (ranks / f"{rank}.err").open("wb") as errors:
            process = subprocess.Popen(
                [*command, "--rank", str(rank), str(world), str(folder), str(ranks)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stderr=errors,
            )
        running.append(process)
    deadline = time.monotonic() + DEADLINE
    while any(
        process.poll() is None for process in running
    ):  # one that failed leaves others waiting
        failed = any(process.poll() for process in running)
        if failed or time.monotonic() > deadline:
            time.sleep(5.0)
            for process in running:
                process.kill()
        time.sleep(0.2)
    for rank, process in enumerate(running):
        if process.returncode > 0:
            lines = (ranks / f"{rank}.err").read_text(errors="replace").strip().splitlines()
            return f"rank {rank} failed: {lines[-1] if lines else process.returncode}"
    if any(process.returncode for process in running):
        return f"no result in {DEADLINE:g} s"
    return [json.loads((ranks / f"{rank}.json").read_text()) for rank in range(world)]


def with_rates(
    found: list[Any], config: Any, world: int, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return all ranks' figures as those of the strategy, beside the plan."""
    from trainer.planning.memory import plan_memory_by_part
    from trainer.planning.model_config import read_shape
    from trainer.planning.replica import make_training_setup
    from trainer.planning.strategy import Strategy

    shape, on_card = read_shape(folder), found[0]["peak"] is not None
    training = make_training_setup(config, accelerator=on_card, recompute=on_card)
    training = replace(training, rows=options.rows)
    pipeline = config.parallel.pipeline
    strategy = Strategy(
        world=world,
        data=config.parallel.data,
        tensor=config.parallel.tensor,
        sequence=config.parallel.sequence,
        stages=pipeline.stages,
        schedule=pipeline.schedule,
        microbatches=pipeline.parts if pipeline.stages > 1 else 1,
    )
    seconds = statistics.median(
        max(step) for step in zip(*(f["seconds"] for f in found), strict=True)
    )
    rate = found[0]["tokens"] / seconds
    card = found[0]["device"]
    mfu = flops_utilization(shape, training, rate, card, world) if on_card else None
    return {
        "device": f"{world} x {card}",
        "seconds": seconds,
        "tokens_per_second": rate,
        "mfu": mfu,
        "peak": max(f["peak"] for f in found) if on_card else None,
        "plan": plan_memory_by_part(shape, training, strategy).total,
    }


def be_rank(rank: int, world: int, model: Path, folder: Path, options: argparse.Namespace) -> None:
    """Train as one of the processes, and write what was found."""
    import torch
    import torch.distributed as dist

    from trainer.model.layout import build_layout
    from trainer.replica.torch.parallel.mesh import make_mesh
    from trainer.replica.torch.parallel.replica import ParallelReplica
    from trainer.run.distributed.optimizer import ParallelAdamW

    on_card = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)  # pyright: ignore[reportPrivateImportUsage]  # documented
    backend = "cpu:gloo,cuda:nccl" if on_card else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    config = run_config(options.strategies[0], world, model, options)
    layout = build_layout(model, config)
    mesh = make_mesh(config.parallel, world, device.type)
    replica = ParallelReplica(model, config, layout, mesh, device, recompute=on_card)
    optimizer = ParallelAdamW(config.optimizer, layout, replica.parameters, replica.copy_counts)
    parts = config.parallel.pipeline.parts if config.parallel.pipeline.stages > 1 else 1
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    first = replica.local_samples(replica.copies).start
    batch = random_rows(vocabulary, options.rows * parts, options.tokens, first)
    seconds: list[float] = []
    for step in range(options.steps + 2):
        if step == 2 and on_card:  # what is allocated once is there
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        began = time.perf_counter()
        replica.accumulate(batch)
        optimizer.apply(step + 1, 1e-5)
        if on_card:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    found = {
        "device": torch.cuda.get_device_name(device) if on_card else "CPU",
        "seconds": seconds[2:],
        "tokens": replica.copies * len(batch) * options.tokens,
        "peak": torch.cuda.max_memory_allocated(device) if on_card else None,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
