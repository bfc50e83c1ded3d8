"""A step that reads its frozen layers over one that keeps them, on the CPU with one thread.

    python benchmarks/streaming.py [--part step paced peak vulkan] [--rounds 5] [--tokens 1024]
                                   [--rows 1] [--gpu NAME]

LoRA on a model of random weights in fp32: 24 layers of hidden 768, 0.23 billion weights. `step`:
both take turns in one process, with the file in the page cache; a round is a step of each, and the
figure is the median ratio of the rounds, of processor time (all threads of the process, the
reader's too) and of elapsed time. How long the step waited for the reader is printed, too. `paced`:
a read sleeps until it has taken as long as at R bytes a second; the figure is the step over the
longer of computing, a resident step of the same round, and of the bytes that it read at R. `peak`:
the most resident memory of a process in a control group of 0.7 GB over the weights, 0.41 billion,
LoRA of rank 4 on a row of 256 tokens. `vulkan`, which is measured if it is asked for: `step` on a
device, whose copies share its one queue; with several rows, each a micro-batch, also without
groups. JSON: benchmarks/results/streaming.json.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rig.report import Ratio, Report
from rig.training_step import random_rows, step_config

from benchmarks.rig.control_group import NoControlGroupError, limit_memory
from benchmarks.rig.random_model import write_model
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout
from trainer.replica.torch.replica import TorchReplica
from trainer.replica.torch.streaming import StreamedLinear
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter
from trainer.replica.wgpu.replica import WgpuReplica

PARTS = ("step", "paced", "peak")
"""Those of a processor."""
VOCABULARY = 8192
PACES = (0.5, 1.0, 2.0)
"""Times of reading, as parts of a resident step's."""
LIMIT, SHORT_ROW = 700_000_000, 256
"""Bytes of the control group, and the tokens of its process's row."""


class Stepper:
    """A replica, and what a step of it takes.

    Args:
        settings: `model.resident`, and others.
        device: of Vulkan; None computes on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        method: str,
        tokens: int,
        settings: dict[str, Any],
        device: Device | None = None,
        rows: int = 1,
    ) -> None:
        config = step_config(folder, method, 1, tokens, {"model.dtype": "float32", **settings})
        layout = build_layout(folder, config)
        self._replica = (
            TorchReplica(folder, config, layout, threads=1)
            if device is None
            else WgpuReplica(folder, config, layout, device)
        )
        self._replica.write_trainable(initial_weights(layout, folder, config))
        self._rows = random_rows(VOCABULARY, rows, tokens, 0)
        self.rate = 0.0
        """Bytes a second at which layers are read; 0: as fast as they come."""
        self._waited, self._read = 0.0, 0
        self.step()  # the first one reads the file and warms up
        if self._replica.residents:
            self._watch_feed()

    def end_groups(self) -> None:
        """Run all layers for one micro-batch after the other."""
        assert isinstance(self._replica, WgpuReplica)
        self._replica.group_tokens = 0

    def step(self) -> dict[str, float]:
        """Return the seconds of a step, those that it waited for the reader, and bytes read."""
        self._waited, self._read = 0.0, 0
        used, start = time.process_time(), time.perf_counter()
        self._replica.forward_backward(self._rows, lambda *_: None)
        used, elapsed = time.process_time() - used, time.perf_counter() - start
        return {"used": used, "elapsed": elapsed, "waited": self._waited, "read": self._read}

    def _watch_feed(self) -> None:
        feed = find_feed(self._replica)
        hold, read_layer = feed.hold, feed._weights.read_layer

        def hold_and_count(layer: int, following: int | None) -> int:
            start = time.perf_counter()
            slot = hold(layer, following)
            self._waited += time.perf_counter() - start
            return slot

        def read_at_pace(layer: int, memory: memoryview) -> int:
            start = time.perf_counter()
            size = read_layer(layer, memory)
            if self.rate:
                time.sleep(max(0.0, start + size / self.rate - time.perf_counter()))
            self._read += size
            return size

        feed.hold, feed._weights.read_layer = hold_and_count, read_at_pace


def find_feed(replica: TorchReplica | WgpuReplica) -> Any:
    """Return what reads the layers of a replica."""
    if isinstance(replica, WgpuReplica):
        uploads: Any = replica._loaded.uploads
        return uploads.feed
    model: Any = replica._model
    linear: Any = next(part for part in model.modules() if isinstance(part, StreamedLinear))
    return linear._stream.feed


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "vulkan"), nargs="+", default=PARTS)
    parser.add_argument("--gpu", default="", help="index, PCI address or part of the name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1, help="micro-batches of part vulkan")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        Stepper(options.peak_of, "lora", SHORT_ROW, {"lora.lora_rank": 4}).step()
        print(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
        return 0
    report = Report("streaming")
    with tempfile.TemporaryDirectory(prefix="motley-streaming-") as scratch:
        os.environ["MOTLEY_CACHE"] = f"{scratch}/cache"  # of weights in NF4
        folder = write_llama(Path(scratch, "model"), options.layers, options.hidden_size)
        if "vulkan" in options.part:
            device = Device(select_adapter(options.gpu, allow_software=True))
            for name, method in (("fp32", "lora"), ("NF4", "qlora")):
                pair = open_pair(folder, method, options.tokens, device, options.rows)
                title = f"{device.adapter.name}, {name}"
                add_steps(report, title, *pair, options.rounds, most=1.12)
                if options.rows > 1:
                    pair[1].end_groups()
                    add_steps(report, f"{title} without groups", *pair, options.rounds, most=1.12)
        if not {"step", "paced"}.isdisjoint(options.part):
            pair = open_pair(folder, "lora", options.tokens)
            if "step" in options.part:
                add_steps(report, "fp32", *pair, options.rounds)
            if "paced" in options.part:
                add_paced(report, *pair, options.rounds)
        if "step" in options.part:
            add_steps(report, "NF4", *open_pair(folder, "qlora", options.tokens), options.rounds)
        if "peak" in options.part:
            add_peak(report, write_llama(Path(scratch, "large"), 24, 1024))
    return report.write()


def write_llama(folder: Path, layers: int, hidden: int) -> Path:
    """Write a model of random weights in fp32."""
    folder.mkdir()
    tree = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    return write_model(folder, tree, "F32")


def open_pair(
    folder: Path, method: str, tokens: int, device: Device | None = None, rows: int = 1
) -> tuple[Stepper, Stepper]:
    """Return one that keeps all layers and one that keeps none."""
    same = {"training.gradient_checkpointing": "off"}
    return (
        Stepper(folder, method, tokens, {**same, "model.resident": "all"}, device, rows),
        Stepper(folder, method, tokens, {**same, "model.resident": 0}, device, rows),
    )


def add_steps(
    report: Report,
    name: str,
    kept: Stepper,
    streamed: Stepper,
    rounds: int,
    most: float = 1.05,
) -> None:
    """Compare steps with the file in the page cache; they begin in turns."""
    found: list[dict[Stepper, dict[str, float]]] = []
    for at in range(rounds):
        found.append({each: each.step() for each in ((kept, streamed), (streamed, kept))[at % 2]})
    steps = [{"resident": each[kept], "streamed": each[streamed]} for each in found]
    for key, words in (("used", "processor time"), ("elapsed", "elapsed time")):
        ratio = statistics.median(each["streamed"][key] / each["resident"][key] for each in steps)
        title = f"{name}, layers are read: {words}"
        report.add(Ratio(title, ratio, "the resident step", most), rounds=steps)
    waited = statistics.median(e["streamed"]["waited"] / e["streamed"]["elapsed"] for e in steps)
    report.add(Ratio(f"{name}: waiting for the reader", waited, "the step"))


def add_paced(report: Report, kept: Stepper, streamed: Stepper, rounds: int) -> None:
    """Compare steps whose reads are slow with the longer of computing and reading."""
    found: dict[float, list[dict[str, float]]] = {pace: [] for pace in PACES}
    size = streamed.step()["read"]
    rates = {pace: size / (pace * kept.step()["elapsed"]) for pace in PACES}
    for _ in range(rounds):
        computing = kept.step()["elapsed"]
        for pace, streamed.rate in rates.items():
            step = streamed.step()
            bound = max(computing, step["read"] / streamed.rate)
            found[pace].append(step | {"computing": computing, "bound": bound})
    for pace, rate in rates.items():
        ratio = statistics.median(each["elapsed"] / each["bound"] for each in found[pace])
        name = f"reads at {pace:g} of a resident step, {rate / 1e6:.0f} MB/s"
        against = Ratio(name, ratio, "the longer of computing and reading", 1.15)
        report.add(against, bytes_per_second=rate, rounds=found[pace])


def add_peak(report: Report, folder: Path) -> None:
    """Measure the peak of a process that has little memory."""
    try:
        with limit_memory(LIMIT) as join:
            command = [*join, sys.executable, __file__, "--peak-of", str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    except NoControlGroupError as error:
        print(f"no peak: {error}")
        return
    peak = 1024 * int(done.stdout.split()[-1])
    weights = (folder / "model.safetensors").stat().st_size
    ratio = Ratio("the peak in 0.7 GB", peak / weights, "the weights", 0.45)
    report.add(ratio, peak=peak, weights=weights, limit=LIMIT)


if __name__ == "__main__":
    sys.exit(main())
