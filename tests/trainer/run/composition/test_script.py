"""`trainer finetune --script`: a module, data and loss of the user's own."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from blake3 import blake3
from safetensors.numpy import load_file

from tests.trainer.script_run import (
    losses,
    plain_losses,
    run_script,
    script_config,
    write_script,
)
from tests.waiting import PATIENCE
from trainer.checkpoint.reader import find_checkpoint
from trainer.config.script import read_script
from trainer.replica.script.checks import read_random_state
from trainer.replica.script.start import run_for_start
from trainer.replica.script.user_script import UserScript, update_digest
from trainer.run.inputs import read_inputs
from trainer.system.errors import DoesNotFitError, InputError, RefusedError
from trainer.tracking.metrics import read_metrics


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path / "train.py")


def test_the_curve_is_that_of_a_plain_loop(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches of 3 samples, gradients as sums, and the weights under the module's names."""
    config = script_config(tmp_path / "out", training__evaluate_every=4)
    assert run_script(script, config) == 0
    expected, model = plain_losses(script, config)
    assert np.abs(losses(tmp_path / "out") / expected - 1).max() < 1e-6
    saved = load_file(find_checkpoint(tmp_path / "out") / "model.safetensors")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(saved) == list(trained)
    latest = load_file(tmp_path / "out/checkpoints/latest/model.safetensors")
    for name, parameter in trained.items():
        np.testing.assert_allclose(latest[name], parameter.detach().numpy(), atol=1e-5)
    records = read_metrics(tmp_path / "out/metrics.jsonl")
    validations = [record for record in records if record["kind"] == "validation"]
    assert [each["step"] for each in validations] == [4, 8, 12]
    missing = model.load_state_dict({k: torch.from_numpy(v) for k, v in latest.items()}, False)
    assert not missing.unexpected_keys
    data = vars(sys.modules["motley_script"])["dataset"]("validation")
    x, y = (torch.stack(part) for part in zip(*data, strict=True))
    with torch.no_grad():
        away = (model(x)[:, 0] - y).abs().mean()
    assert validations[-1]["figures"]["absolute"] == pytest.approx(float(away), rel=1e-5)
    assert "load_state_dict" in (tmp_path / "out/model/README.md").read_text()
    assert " samples/s" in capsys.readouterr().err


def test_a_run_resumes_bit_for_bit_and_only_with_its_script(script: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    settings = {"checkpoint__every": 3, "optimizer__scheduler": "constant"}
    assert run_script(script, script_config(whole, training__max_steps=8, **settings)) == 0
    for steps in (4, 8):
        config = script_config(halves, training__max_steps=steps, **settings)
        assert run_script(script, config) == 0
    one, other = (find_checkpoint(folder) / "model.safetensors" for folder in (whole, halves))
    assert one.read_bytes() == other.read_bytes()
    script.write_text(script.read_text() + "\n# changed\n")
    with pytest.raises(InputError, match="its script has changed"):
        run_script(script, script_config(halves, training__max_steps=9, **settings))


def test_a_budget_stops_the_run_of_a_script_and_a_higher_one_goes_on(
    script: Path, tmp_path: Path
) -> None:
    """Its next checkpoint is a million steps away, which after a few is seen to cost more."""
    budget = {"ceiling": 2.0, "currency": "EUR", "hosts": [{"name": "here", "price_hour": 3.6}]}
    settings = {"checkpoint__every": 10**6, "optimizer__scheduler": "constant"}
    config = script_config(tmp_path / "out", training__max_steps=10**6, budget=budget, **settings)
    assert run_script(script, config) == 9
    status = json.loads((tmp_path / "out/status.json").read_bytes())
    assert status["reason"].startswith("budget.ceiling: ")
    assert status["checkpoint"]["step"] == status["step"]
    config = script_config(
        tmp_path / "out",
        training__max_steps=status["step"] + 2,
        budget=budget | {"ceiling": 1e6},
        **settings,
    )
    assert run_script(script, config) == 0
    assert len(losses(tmp_path / "out")) == status["step"] + 2


def test_a_coordinator_has_the_start_of_a_child_and_no_torch(script: Path) -> None:
    """Its layout, weights and digests are those of a process that computes."""
    config = script_config(script.parent / "out")
    inputs = read_inputs(config, "run", script=read_script(script))
    facts, layout, weights = run_for_start(read_script(script), 0, PATIENCE)
    assert layout == inputs.layout
    assert inputs.script is not None
    assert inputs.read_weights().tobytes() == weights.tobytes()
    assert (facts.samples, facts.validation) == (48, 12)
    asked = (
        "import sys\nfrom pathlib import Path\nfrom trainer.config.run import load_config\n"
        "from trainer.config.script import read_script\n"
        "from trainer.run.inputs import read_inputs\n"
        f"script = read_script(Path({str(script)!r}))\n"
        "config = load_config(None, {'task': 'script'})\n"
        "found = read_inputs(config, 'run', script=script, computes=False)\n"
        "assert 'torch' not in sys.modules\nprint(found.job.model_digest, found.job.data_digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.split() == [inputs.job.model_digest, inputs.job.data_digest], done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('reduction="sum"', 'reduction="mean"', "loss: is a mean: four samples have"),
        ("), len(samples)", "), 1", "loss: is not a sum over the samples"),
        ("y, reduction", "y - y.mean(), reduction", "loss: is not a sum over the samples"),
        ("return F.mse", "raise KeyError('x')\n    return F.mse", "train.py:17: loss: KeyError"),
        ("[:, 0], y", "[:, 5], y", "train.py:17: loss: IndexError"),
        ("), len(samples)", ").item(), 2", "loss: must return a tensor without dimensions"),
        ("nn.Tanh(), nn.Linear(8", "nn.Dropout(0.1), nn.Linear(8", "module 1 (Dropout) draws"),
        ("torch.stack(part)", "torch.rand(1) + torch.stack(part)", "loss or dataset draws"),
        ("nn.Tanh(), nn.Linear(8", "nn.BatchNorm1d(8), nn.Linear(8", "the buffer 1.running_mean"),
        ("nn.Linear(16, 1))", "nn.Linear(16, 1)).double()", "parameter 2.weight is float64"),
        ("nn.Linear(16, 1))", "nn.Linear(16, 1)).requires_grad_(False)", "no parameter that req"),
        ("return nn.Sequential(frozen", "return (frozen", "returned no torch.nn.Module but tuple"),
        ("return [(row", "return iter([1]) or [(row", "a sequence is needed"),
        ("def dataset(split):", "def dataset(split):\n    return []", "is empty"),
        ("import torch", "raise SystemExit", "train.py:2: the script: SystemExit"),
        ("return F.mse", "exit(0)\n    return F.mse", "train.py:17: loss: SystemExit: 0"),
        ("return F.mse", "model[2].weight.requires_grad = False\n    return F.mse", "r 2.weight"),
        ("return F.mse", "model[2] = nn.Linear(8, 16)\n    return F.mse", "parameter 2.weight or"),
        (
            "return F.mse",
            "with torch.no_grad(): model[2].weight.clamp_(-9, 9)\n    return F.mse",
            "r 2.weight or it",
        ),
        (
            "return F.mse",
            "model[2].weight.data.mul_(0.5)\n    return F.mse",
            "changes the parameter 2.weight or it",
        ),
        ("return F.mse", "model(x).sum().backward()\n    return F.mse", "parameter 2.weight or it"),
    ],
)
def test_a_script_that_is_wrong_is_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write_script(tmp_path / "train.py", (old, new))
    with pytest.raises(InputError) as raised:
        run_script(path, script_config(tmp_path / "out"))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(path))


class Slotted:
    """An object whose content no `__dict__` has."""

    __slots__ = ("x",)

    def __init__(self, x: object) -> None:
        self.x = x


@pytest.mark.parametrize(
    "make",
    [
        Slotted,
        lambda x: {"a": [x]},
        lambda x: {x},
        lambda x: datetime(2000, 1, int(x), tzinfo=UTC),
        lambda x: np.array([x, None]),
        lambda x: torch.tensor(x),
        lambda x: Path(str(x)),
        lambda x: Counter(a=x),
        lambda x: (int, float)[x - 1],
    ],
)
def test_a_digest_has_the_content_of_every_kind_of_sample(make: Callable[[int], object]) -> None:
    def digest(value: object) -> str:
        hasher = blake3()
        update_digest(hasher, value)
        return hasher.hexdigest()

    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


def test_a_sample_that_hosts_cannot_compare_is_refused(tmp_path: Path) -> None:
    path = write_script(tmp_path / "train.py", ("row.sin().sum())", "iter(x for x in row))"))
    with pytest.raises(InputError, match=r"dataset: TypeError: cannot pickle 'generator' object"):
        run_script(path, script_config(tmp_path / "out"))


def test_frozen_parameters_are_those_that_the_script_makes(script: Path, tmp_path: Path) -> None:
    """The lines of docs/own-model.md: the loaded model has the loss of the last validation."""
    config = script_config(tmp_path / "out", training__seed=7)
    assert run_script(script, config) == 0
    made = runpy.run_path(str(script))
    torch.manual_seed(7)
    model = made["model"]()
    saved = safetensors.torch.load_file(tmp_path / "out/checkpoints/latest/model.safetensors")
    assert model.load_state_dict(saved, strict=False).missing_keys == ["0.weight", "0.bias"]
    with torch.no_grad():
        total, count = made["loss"](model, made["dataset"]("validation"))
    (last,) = (r for r in read_metrics(tmp_path / "out/metrics.jsonl") if r["kind"] == "validation")
    assert last["loss"] == pytest.approx(float(total) / count, rel=1e-5)


def test_what_a_script_draws_itself_is_the_same_on_every_host(tmp_path: Path) -> None:
    drawn = (
        "import random\nimport numpy\nX = random.random() + numpy.random.rand() + torch.rand(1)\n"
    )
    changes = ("import torch\n", f"import torch\n{drawn}"), ("row.sin().sum())", "row.sum() + X)")
    path = write_script(tmp_path / "train.py", *changes)
    one, other = (UserScript(read_script(path), 0, PATIENCE).facts for _ in range(2))
    assert one == other


def test_one_more_number_of_numpy_is_noticed() -> None:
    """It moves the generator's position; its block of numbers changes at each 624th alone."""
    device = torch.device("cpu")
    np.random.seed(0)
    np.random.rand()
    before = read_random_state(device, whole=True)
    assert read_random_state(device, whole=True) == before
    np.random.rand()
    assert read_random_state(device, whole=True) != before


def test_what_a_script_raises_in_mid_run_is_the_end_of_the_run(tmp_path: Path) -> None:
    """The status says why, and the next process may write at once."""
    late = (
        "return F.mse",
        "[0][loss.__dict__.setdefault('calls', []).append(1) or "
        "len(loss.calls) // 9]\n    return F.mse",
    )
    path = write_script(tmp_path / "train.py", late)
    config = script_config(tmp_path / "out")
    with pytest.raises(InputError, match=r"train\.py:17: loss: IndexError"):
        run_script(path, config)
    status = json.loads((tmp_path / "out/status.json").read_bytes())
    assert status["state"] == "failed"
    assert "train.py:17: loss: IndexError" in status["reason"]


@pytest.mark.parametrize("name", ["two words", "X", "é", "a" * 33])
def test_a_metric_has_a_short_plain_name(tmp_path: Path, name: str) -> None:
    path = write_script(tmp_path / "train.py", ('"absolute"', repr(name)))
    with pytest.raises(InputError, match="names \\(small letters, digits and _\\)"):
        run_script(path, script_config(tmp_path / "out"))


def test_a_model_that_does_not_fit_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """Its weights have half of the free memory, and are not written to: gradients come on top."""
    huge = (
        "def model():\n    import psutil\n    free = psutil.virtual_memory().available\n"
        "    return nn.ParameterList([torch.empty(free // 8)])\n"
    )
    path = write_script(tmp_path / "train.py", ("def model():", huge + "\ndef unused():"))
    message = r"py: model: no memory for it \([\d,]+ trainable parameters need .* GiB are free\);"
    with pytest.raises(DoesNotFitError, match=message):
        run_script(path, script_config(tmp_path / "out"))
    with pytest.raises(InputError, match=message):
        run_for_start(read_script(path), 0, PATIENCE)


def test_a_model_that_does_not_fit_its_device_is_one_line(tmp_path: Path) -> None:
    path = write_script(
        tmp_path / "train.py",
        ("def model():", "class Huge(nn.Linear):\n    to = 1\n\ndef model():"),
        ("to = 1", "def to(self, device): raise MemoryError('no room')"),
        ("frozen = nn.Linear(6, 8).requires_grad_(False)", "return Huge(6, 1)"),
    )
    with pytest.raises(DoesNotFitError, match=r"train\.py:7: model: no memory for it \(no room\)"):
        run_script(path, script_config(tmp_path / "out"))


def test_the_coordinator_waits_for_no_thread_of_a_script(tmp_path: Path) -> None:
    """One that is left would write as its process waits for it."""
    left = tmp_path / "left"
    thread = (
        "import threading\n"
        f"def wait():\n    threading.main_thread().join()\n    open({str(left)!r}, 'w')\n"
        "threading.Thread(target=wait).start()\n"
    )
    path = write_script(tmp_path / "train.py", ("import torch\n", f"import torch\n{thread}"))
    run_for_start(read_script(path), 0, PATIENCE)
    assert not left.exists()


def test_a_nan_halts_the_run_and_names_the_tensor(tmp_path: Path) -> None:
    change = ("[:, 0], y, red", "[:, 0] / (x[:, 0] < 1.5), y, red")
    path = write_script(tmp_path / "train.py", change)
    assert run_script(path, script_config(tmp_path / "out")) == 5
    reason = json.loads((tmp_path / "out/status.json").read_bytes())["reason"]
    assert "2.weight" in reason or "loss" in reason


def test_local_buffers_are_each_workers_own(tmp_path: Path) -> None:
    counting = "class Counts(nn.Tanh):\n    def __init__(self):\n        super().__init__()\n"
    counting += "        self.register_buffer('seen', torch.zeros(1))\n"
    counting += "    def forward(self, x):\n        self.seen += len(x)\n"
    counting += "        return super().forward(x)\n\ndef model():"
    changes = [("def model():", counting), ("nn.Tanh(), nn.Linear(8", "Counts(), nn.Linear(8")]
    path = write_script(tmp_path / "train.py", *changes)
    with pytest.raises(InputError, match=r"loss: changes the buffer 1\.seen"):
        run_script(path, script_config(tmp_path / "out"))
    write_script(path, *changes, ("import torch\n", "import torch\nbuffers = 'local'\n"))
    config = script_config(tmp_path / "out")
    assert run_script(path, config) == 0
    assert np.abs(losses(tmp_path / "out") / plain_losses(path, config)[0] - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("hang", "line"),
    [
        ("while True: pass", "{}:17: loss: has not returned for 2 s"),
        (
            "import ctypes, signal\n"
            "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
            "    ctypes.CDLL(None).pause()",
            "{}: loss: has not returned for 4 s",
        ),
        (
            "import ctypes, signal\n"
            "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
            "    ctypes.PyDLL(None).sleep(1000)",
            "{}: loss: has not returned for 4 s",
        ),
    ],
    ids=["in Python", "in C", "in C with Python's lock"],
)
def test_a_script_that_hangs_ends_the_process_in_one_line(
    tmp_path: Path, hang: str, line: str
) -> None:
    path = write_script(tmp_path / "train.py", ("return F.mse", f"{hang}\n    return F.mse"))
    command = [sys.executable, "-m", "trainer.cli", "finetune", "--script", str(path)]
    command += ["-o", str(tmp_path / "out"), "--gpu-backend", "cpu", "--threads", "1"]
    command += ["--set", "exchange.join_deadline=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 3, done.stderr
    assert line.format(path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "train.py", "--data", "x.jsonl"], "data.train: a script has its own model"),
        (["model", "--script", "train.py"], "model.path: a script has its own model"),
        (["--script", "train.py", "--task", "dpo"], "leave out --task dpo"),
        (["--script", "train.py", "--method", "lora"], "method lora: a script has its own"),
        (["--script", "train.py", "--max-seq-len", "9"], "data.max_seq_len: a script has its own"),
        (["--config", "run.yaml"], "name the script with --script FILE"),
        (["--config", "run.yaml", "--set", "script=train.py"], "script: unknown key"),
        (["--script", "gone.py"], "gone.py: cannot be read"),
        (["--script", "train.py", "--gpu-backend", "wgpu"], "a script computes with torch"),
        (["--script", "train.py", "--script-digest", "0"], "is not the script that the run"),
    ],
)
def test_what_a_script_has_itself_is_refused_by_name(
    script: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    from trainer.commands.finetune import finetune

    monkeypatch.chdir(script.parent)
    Path("run.yaml").write_text("task: script\n")
    with pytest.raises((InputError, RefusedError)) as raised:
        finetune.main([*arguments, "-o", "out"], standalone_mode=False)
    assert message in str(raised.value)
