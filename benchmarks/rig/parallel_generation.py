"""Tokens a second of two processes against one, for `benchmarks/parallel.py`."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from rig.parallel_models import meshes, rows, settings, write_model
from rig.report import Ratio, Report

WIDTHS = (256, 512, 1024)
NEW_TOKENS = 24


def time_generation(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of a run of one process and of two, in turn, by the model's width."""
    import torch
    import torch.distributed as dist

    from trainer.config.run import load
    from trainer.model.initialization import initial_weights
    from trainer.model.layout import build_layout
    from trainer.replica.sampling import Sampling
    from trainer.replica.torch.generator import load_generator
    from trainer.replica.torch.parallel.generator import load_parallel_generator

    tensor, found = meshes()["tp"]["tensor"], {}
    prompts = rows()[:1, :16].tolist()
    for width in WIDTHS:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 4, "head_dim": width // 4}
        path = write_model(folder, **sizes)
        config = load(None, settings(path))
        layout = build_layout(path, config)
        model = path, config, layout, initial_weights(layout, path, config)
        generators = [
            load_generator(*model),
            load_parallel_generator(*model, tensor, torch.device("cpu")),
        ]
        times: list[list[float]] = [[], []]
        made: list[Any] = [None, None]
        for _ in range(max(3, rounds // 3) + 1):
            for both, generator in enumerate(generators):
                dist.barrier()
                if both or dist.get_rank() == 0:
                    began = time.perf_counter()
                    made[both] = generator.generate(
                        prompts, max_new_tokens=NEW_TOKENS, sampling=Sampling()
                    )
                    times[both].append(time.perf_counter() - began)
        assert dist.get_rank() or made[0] == made[1], "two processes make other tokens than one"
        found[str(width)] = [seconds[1:] for seconds in times]
    return found


def report_generation(report: Report, ranks: list[Any]) -> None:
    """Report the speed-up at each width."""
    for width in WIDTHS:
        one, two = (statistics.median(seconds) for seconds in ranks[0][str(width)])
        report.add(
            Ratio(f"width {width}: two processes", one / two, "the tokens/s of one"),
            tokens_per_second=[round(NEW_TOKENS / seconds, 1) for seconds in (one, two)],
        )
