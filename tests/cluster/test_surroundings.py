"""Surroundings that no one plans for: paths of any characters, a bare environment, dead proxies."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import forked
from tests.trainer.small_model import write_data, write_model

pytestmark = pytest.mark.cluster
TRAINER = (sys.executable, "-m", "trainer.cli")
HERE = ("--threads", "1", "--gpu-backend", "cpu")
DEAD = dict.fromkeys(
    ("http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"), "socks5h://127.0.0.1:1"
)


@pytest.mark.smoke("start")
def test_odd_paths_in_a_bare_environment(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a "q" 100%#x'
    odd.mkdir()
    data = write_data(odd / "t t.jsonl", 40)
    model = write_model(odd / "mo del", data)
    bare = {name: value for name, value in os.environ.items() if name != "HOME"}
    bare |= DEAD | {"TMPDIR": "/nonexistent"}
    before = os.umask(0o077)
    try:
        for words in (
            ["finetune", str(model), "--data", str(data), "--max-steps", "1", "-o", f"{odd}/out"],
            ["evaluate", f"{odd}/out", "--data", str(data)],
            ["merge", f"{odd}/out", "-o", f"{odd}/merged"],
        ):
            flags = () if words[0] == "merge" else HERE
            done = forked.run([*TRAINER, *words, *flags], bare)
            assert done.returncode == 0, done.stderr
    finally:
        os.umask(before)
    assert (odd / "merged/model.safetensors").exists()


@pytest.mark.smoke("start")
def test_two_processes_over_ipv6_beside_dead_proxies(tmp_path: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            address = f"[::1]:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("needs IPv6 on loopback")
    data = write_data(tmp_path / "t.jsonl", 40)
    model = write_model(tmp_path / "model", data)
    job = ["finetune", str(model), "--data", str(data), "--max-steps", "2", *HERE]
    environment = {**os.environ, **DEAD}
    head = ["--role", "coordinator", "--bind", address, "--expect-workers", "1"]
    output = str(tmp_path / "out")
    coordinator = forked.Program([*TRAINER, *job, *head, "-o", output], environment)
    worker = ["--role", "worker", "--rank", "0", "--coordinator", address]
    done = forked.run([*TRAINER, *job, *worker], environment)
    _, said = coordinator.communicate()
    assert (done.returncode, coordinator.returncode) == (0, 0), done.stderr + said
    assert json.loads((tmp_path / "out/status.json").read_bytes())["step"] == 2


@pytest.mark.smoke("refuse")
def test_nan_in_the_model_halts_before_the_update(tmp_path: Path) -> None:
    data = write_data(tmp_path / "t.jsonl", 40)
    model = write_model(tmp_path / "model", data)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = ["finetune", str(model), "--data", str(data), "--max-steps", "2", *HERE]
    done = forked.run([*TRAINER, *words, "-o", str(tmp_path / "out")], os.environ)
    assert done.returncode == 5
    assert "nan in block" in done.stderr
    assert ", tensor " in done.stderr
    assert not list((tmp_path / "out/checkpoints").glob("step-*"))
