"""The start of a script's run: its layout, digests, counts and first weights.

A coordinator has no torch. A child process runs the script once, and hands this over as one
safetensors file: the first weights under the module's own names, in order, and a metadata entry.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from trainer.config.script import Script
from trainer.model.header_layout import NamedTensor
from trainer.model.hf_export import MODEL_FILE, raw_bytes, safetensors_header
from trainer.model.layout import GradientLayout, lay_out_tensors
from trainer.model.safetensors_headers import read_file_headers, read_metadata
from trainer.system.errors import InputError, UnreachableError
from trainer.system.untrusted_data import validate_json

log = logging.getLogger(__name__)

_BLOCK = 1 << 18
"""Elements from which on a block is full: 1 MiB leaves as one while backward continues."""
_ENTRY = "motley.script"


@dataclass(frozen=True)
class ScriptFacts:
    """Facts of a script that all members must find alike."""

    frozen: str
    """Digest of the frozen parameters and the buffers at the start."""
    data: str
    """Digest of the sizes of both data sets, and of samples all over them."""
    samples: int
    validation: int


def build_script_layout(shapes: Mapping[str, tuple[int, ...]]) -> GradientLayout:
    """Return the layout of trainable parameters in their order; small ones share a block."""
    groups: list[list[NamedTensor]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size >= _BLOCK:
            groups.append([])
            size = 0
        groups[-1].append(NamedTensor(name, shape))
        size += math.prod(shape)
    return lay_out_tensors((f"layers.{index}", group) for index, group in enumerate(groups))


def write_start(facts: ScriptFacts, layout: GradientLayout, flat: np.ndarray, folder: Path) -> None:
    """Write a start as `MODEL_FILE`."""
    shapes = {slot.name: slot.shape for slot in layout.iter_tensors()}
    with (folder / MODEL_FILE).open("wb") as file:
        file.write(safetensors_header(shapes, {_ENTRY: json.dumps(asdict(facts))}))
        file.write(raw_bytes(flat))


def run_for_start(
    script: Script, seed: int, limit: float
) -> tuple[ScriptFacts, GradientLayout, np.ndarray]:
    """Run a script in a child that has torch; return facts, layout and first weights.

    Args:
        limit: seconds that each function of the script may take.

    Raises:
        InputError: the script cannot be used; its line says why.
        UnreachableError: it does not return.
    """
    with tempfile.TemporaryDirectory(prefix="motley-") as folder:
        module, terms = "trainer.replica.script.user_script", (script.digest, str(seed), str(limit))
        command = [sys.executable, "-P", "-m", module, str(script.path), *terms, folder]
        log.info("%s: creating the initial weights ...", script.path)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True
        )
        if code := ended.returncode:
            lines = ended.stderr.decode(errors="replace").strip().splitlines()
            kind = UnreachableError if code == UnreachableError.exit_code else InputError
            raise kind(lines[-1] if lines else f"{script.path}: its process exited with {code}")
        path = Path(folder) / MODEL_FILE
        headers = read_file_headers(path)
        facts = validate_json(ScriptFacts, read_metadata(path)[_ENTRY].encode(), str(path))
        layout = build_script_layout({name: header.shape for name, header in headers.items()})
        begin = next(iter(headers.values())).begin
        return facts, layout, np.fromfile(path, "<f4", layout.size, offset=begin)
