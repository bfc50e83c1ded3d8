"""A run of one process has one state, and the bits of a run with one on either side."""

from __future__ import annotations

import json
import time
from pathlib import Path

from trainer.config.run import load_config
from trainer.exchange.transport.local import LocalExchange
from trainer.exchange.worker.session import Session
from trainer.init_model import ModelSizes, init_model
from trainer.optimizer.adamw import TrainState
from trainer.replica.backend import ReplicaChoice
from trainer.replica.torch.replica import TorchReplica
from trainer.run.composition import run as build
from trainer.run.inputs import RunInputs, read_inputs


def _inputs(folder: Path, output: str) -> RunInputs:
    data = folder / "train.jsonl"
    model = folder / "model"
    if not model.exists():
        lines = [{"text": f"step {number} of the way, and back"} for number in range(24)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        init_model(data, model, ModelSizes(hidden_size=64, num_layers=2), 0)
    settings = {
        "model.path": str(model),
        "data.train": str(data),
        "data.max_seq_len": 32,
        "data.validation_fraction": 0.0,
        "task": "causal-lm",
        "method": "full",
        "training.batch_size": 8,
        "training.epochs": 2,
        "checkpoint.every": 2,
        "output": str(folder / output),
    }
    return read_inputs(load_config(None, settings), "run")


def _train(inputs: RunInputs, *, shared: bool) -> tuple[TorchReplica, TrainState]:
    replica = TorchReplica(inputs.model_dir, inputs.config, inputs.layout, threads=1)
    choice = ReplicaChoice(replica, "cpu", "")
    coordinator, recorder = build.make_coordinator(inputs, 1, time.monotonic())
    state = coordinator.training.state
    request = build.make_request(inputs, choice, 0)
    session = Session(request, inputs.layout, "fp32", shared=state if shared else None)
    exchange = LocalExchange(coordinator, session, recorder)
    end = build.make_worker(inputs, choice, lambda: exchange).run()
    assert recorder.close(end.exit_code, end.reason) == 0
    return replica, state


def test_one_process_has_one_state_and_the_bits_of_two(tmp_path: Path) -> None:
    alone, one = _train(_inputs(tmp_path, "one"), shared=True)
    apart, two = _train(_inputs(tmp_path, "two"), shared=False)
    assert one.step == two.step == 6
    assert one.compute_digest() == two.compute_digest()
    assert alone.weights.data_ptr() == one.weights.ctypes.data
    assert apart.weights.data_ptr() != two.weights.ctypes.data
