"""What generated answers cost."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rig.report import Ratio, Report
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.teacher.torch_author import open_generate
from trainer.replica.backend import Compute
from trainer.replica.sampling import ScoredSampling

_PROMPT = 32
"""Tokens of a prompt: the beginning of a document."""


def generate(report: Report, arguments: argparse.Namespace) -> None:
    """New tokens a second by the answers that are written together.

    On the CPU it is a CPU second of one thread, which does not depend on what else runs.
    """
    on_cpu = arguments.backend == "cpu"
    clock, unit = (time.process_time, "CPU second") if on_cpu else (time.perf_counter, "second")
    compute = Compute(arguments.backend, threads=1 if on_cpu else None)
    model: Path = arguments.model
    text = Path(__file__).read_text(encoding="utf-8")
    ids = load_tokenizer(model).encode(text).ids
    speed: dict[int, float] = {}
    for batch in (1, 8, 32):
        dtype, length = "float32" if on_cpu else "bfloat16", _PROMPT + arguments.tokens
        write = open_generate(model, dtype, compute, batch, length)
        prompts = [ids[at : at + _PROMPT] for at in range(batch)]
        sampling = ScoredSampling(temperature=1.0, numbers=range(batch))
        write(prompts, max_new_tokens=2, sampling=sampling)  # warms up
        began = clock()
        made = write(prompts, max_new_tokens=arguments.tokens, sampling=sampling)
        speed[batch] = sum(map(len, made)) / (clock() - began)
        print(f"batch {batch}: {speed[batch]:,.0f} new tokens per {unit}", flush=True)
    report.add(
        Ratio("32 answers at once", speed[32] / speed[1], "one at a time", better="higher"),
        **{f"tokens_per_{unit.lower().replace(' ', '_')}": speed},
    )
