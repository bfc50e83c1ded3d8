"""The start of a script's run: its layout, digests, counts and first weights.

A coordinator has no torch. A child process runs the script once, and hands this over as one
safetensors file: the first weights under the module's own names, in order, and a metadata entry.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from trainer.config.script import Script
from trainer.model.hf_export import MODEL_FILE, raw_bytes, safetensors_header
from trainer.model.initialization import read_tensor
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.model.safetensors_headers import read_file_headers, read_metadata
from trainer.system.errors import InputError
from trainer.system.untrusted_data import validate_json

log = logging.getLogger(__name__)

BLOCK = 1 << 18
"""Elements from which on a block is full: 1 MiB leaves as one while backward continues."""
_ENTRY = "motley.script"


@dataclass(frozen=True)
class Facts:
    """Facts of a script: those that all members must find alike, and those of its own."""

    script: str
    """Digest of the script's content."""
    frozen: str
    """Digest of the frozen parameters and the buffers at the start."""
    data: str
    """Digest of the sizes of both data sets, and of samples all over them."""
    samples: int
    validation: int


@dataclass(frozen=True)
class ScriptStart:
    """The start of a run of a script."""

    facts: Facts
    layout: GradientLayout
    weights: np.ndarray
    """fp32 `[layout.size]`."""


def build_script_layout(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> GradientLayout:
    """Return the layout of trainable parameters in their order; small ones share a block."""
    blocks: list[Block] = []
    slots: list[TensorSlot] = []
    start = 0

    def close() -> None:
        index = len(blocks)
        first, last = slots[0].start, slots[-1].stop
        blocks.append(Block(index, f"layers.{index}", first, last, tuple(slots)))
        slots.clear()

    for name, shape in shapes:
        slots.append(TensorSlot(name, shape, start))
        start = slots[-1].stop
        if start - slots[0].start >= BLOCK:
            close()
    if slots:
        close()
    return GradientLayout(tuple(blocks), len(blocks))


def write_start(start: ScriptStart, folder: Path) -> None:
    """Write a start as `MODEL_FILE`."""
    shapes = {slot.name: slot.shape for slot in start.layout.iter_tensors()}
    header = safetensors_header(shapes, {_ENTRY: json.dumps(asdict(start.facts))})
    with (folder / MODEL_FILE).open("wb") as file:
        file.writelines(chain([header], [raw_bytes(start.weights)]))


def read_start(folder: Path) -> ScriptStart:
    """Read it back.

    Raises:
        InputError: the file is missing or damaged.
    """
    path = folder / MODEL_FILE
    headers = read_file_headers(path)
    try:
        facts = validate_json(Facts, str(read_metadata(path).get(_ENTRY)).encode(), str(path))
    except ValueError as error:
        raise InputError(str(error)) from None
    layout = build_script_layout((name, header.shape) for name, header in headers.items())
    weights = np.concatenate([read_tensor(header).reshape(-1) for header in headers.values()])
    return ScriptStart(facts, layout, weights)


def run_for_start(script: Script, seed: int) -> ScriptStart:
    """Run a script in a child that has torch, and return the start that it makes.

    Raises:
        InputError: the script cannot be used; its line says why.
    """
    with tempfile.TemporaryDirectory(prefix="motley-") as folder:
        command = [sys.executable, "-P", "-m", "trainer.replica.script", str(script.path)]
        command += [script.digest, str(seed), folder]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        log.info("%s: making the first weights ...", script.path)
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        if ended.returncode:
            reason = lines[-1] if lines else f"the process ended with {ended.returncode}"
            raise InputError(reason)
        return read_start(Path(folder))
