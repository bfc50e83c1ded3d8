"""Every check finds what it is there for, says what to do, and cannot hang the start."""

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from launcher.devices import Device
from launcher.host_checks import (
    check_cuda,
    check_devices,
    check_folder,
    check_port,
    check_trainer,
    host_probes,
    python_beside,
)
from launcher.inventory import Host
from launcher.job_checks import check_data, check_memory, check_model, check_output
from launcher.placement import Setting, place
from launcher.preflight import Finding, Probe, examine
from trainer.config import load

SETTING = Setting(run_id="x-1", trainer_command=("trainer",), state_folder="/s", routes={})


def test_a_port_in_use_names_its_owner_and_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = check_port("127.0.0.1", port)
        assert finding.status == "fail"
        assert f"port {port} on 127.0.0.1 is in use" in finding.detail
        assert f"(pid {os.getpid()})" in finding.detail
        assert f"motley_port={port + 1}" in finding.remedy
    assert check_port("127.0.0.1", port).status == "ok"


def test_an_address_of_another_machine_is_said() -> None:
    finding = check_port("192.0.2.1", 9000)  # TEST-NET-1, RFC 5737
    assert "no address of this host" in finding.detail


def test_folders(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "to" / "be" / "made", 1).status == "ok"
    assert "are needed" in check_folder(tmp_path, 1 << 62).detail
    (tmp_path / "file").touch()
    assert "is not a folder" in check_folder(tmp_path / "file" / "below", 1).detail


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"input": "a", "label": 1}\n', "ok"),
        (b'{"input": "' + b"a" * (2 << 20) + b'"}\n', "ok"),
        (b"", "fail"),
        (b"[1]\n", "fail"),
        (b"\xff\xfe\n", "fail"),
    ],
)
def test_data_files(tmp_path: Path, content: bytes, status: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    finding = check_data(tmp_path / "train.jsonl", "x")
    assert finding.status == status
    assert str(tmp_path) in finding.detail


def test_a_missing_data_file_and_a_missing_model(tmp_path: Path) -> None:
    finding = check_data(tmp_path / "absent", "--data FILE")
    assert "no such file" in finding.detail
    assert finding.remedy == "give --data FILE"
    config = load("quickstart", {"model.path": str(tmp_path / "absent")})
    assert f"no model folder {tmp_path / 'absent'}" in check_model(config).detail
    (tmp_path / "config.json").write_text("{")
    broken = load("quickstart", {"model.path": str(tmp_path)})
    assert check_model(broken).status == "fail"


def test_the_checkpoints_of_another_run_are_not_written_over(tmp_path: Path) -> None:
    assert check_output(tmp_path, "run-2").status == "ok"
    (tmp_path / "status.json").write_text('{"run_id": "run-1"}')
    assert check_output(tmp_path, "run-2").status == "ok"  # it had saved nothing
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    finding = check_output(tmp_path, "run-2")
    assert finding.status == "fail"
    assert "--resume run-1" in finding.remedy
    assert check_output(tmp_path, "run-1").status == "ok"
    (tmp_path / "status.json").write_text("torn {")
    assert check_output(tmp_path, "run-2").status == "ok"  # the trainer judges by the manifests


def test_a_trainer_that_is_not_there() -> None:
    assert "not an executable" in check_trainer("/no/such/trainer", own=False).detail
    assert check_trainer("/bin/sh", own=False).status == "ok"


def test_devices_that_do_not_work_are_never_passed_over() -> None:
    finding = check_devices(["cpu"], ["NVIDIA card at 0000:01:00.0 cannot be used: no driver"])
    assert finding.status == "fail"
    assert "no driver" in finding.detail
    assert check_devices(["cpu", "cpu"], []).detail == "2 x cpu"


def stand_in_python(folder: Path, code: str) -> str:
    """Write a program that stands in for a trainer's Python and runs its own code."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
    python.chmod(0o700)
    return str(python)


def test_torch_must_see_every_planned_card(tmp_path: Path) -> None:
    cards = ["GPU-1", "GPU-2"]
    counting = "print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
    assert check_cuda(stand_in_python(tmp_path, counting), cards).status == "ok"
    finding = check_cuda(stand_in_python(tmp_path, "print(1)"), cards)
    assert finding.status == "fail"
    assert finding.detail == "torch sees 1 of 2 cards (GPU-1, GPU-2)"
    assert "motley_devices=[{backend: cpu}]" in finding.remedy
    finding = check_cuda(stand_in_python(tmp_path, "sys.exit('warning\\nno kernel image')"), cards)
    assert (finding.status, finding.detail) == ("fail", "no kernel image")
    assert check_cuda(str(tmp_path / "absent"), cards).status == "fail"
    assert check_cuda(None, cards).status == "warn"


@pytest.mark.slow
def test_the_torch_of_this_environment_is_really_asked() -> None:
    """On a machine without CUDA it says so; with CUDA, it does not know a card of this name."""
    finding = check_cuda(sys.executable, ["GPU-00000000-0000-0000-0000-000000000000"])
    assert finding.status == "fail"
    assert "without CUDA" in finding.detail or "torch sees 0 of 1 cards" in finding.detail


def test_cuda_is_asked_for_planned_cards_alone(tmp_path: Path) -> None:
    def names(*devices: Device) -> list[str]:
        host = Host(name="localhost", connection="local", devices=devices)
        plan = place([host], load("quickstart"), None, SETTING)
        return [probe.name for probe in host_probes(plan, tmp_path, {})]

    assert "cuda" in names(Device("cuda", "GPU-1"), Device("cpu", "cpu"))
    assert "cuda" not in names(Device("cpu", "cpu"))


def test_the_python_of_a_trainer_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "trainer").touch(mode=0o700)
    assert python_beside(str(tmp_path / "trainer")) is None
    python = stand_in_python(tmp_path, "")
    assert python_beside(str(tmp_path / "trainer")) == python
    assert python_beside(str(tmp_path / "absent")) is None


def model_folder(tmp_path: Path) -> Path:
    """Make a Qwen3 of real size by its headers alone; where weights would be the file is a hole."""
    import json
    import struct

    hidden, inner, layers, vocabulary = 2560, 9728, 4, 151936
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocabulary, hidden]}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": [4096, hidden],
            f"{prefix}self_attn.k_proj.weight": [1024, hidden],
            f"{prefix}self_attn.v_proj.weight": [1024, hidden],
            f"{prefix}self_attn.o_proj.weight": [hidden, 4096],
            f"{prefix}self_attn.q_norm.weight": [128],
            f"{prefix}self_attn.k_norm.weight": [128],
            f"{prefix}mlp.gate_proj.weight": [inner, hidden],
            f"{prefix}mlp.up_proj.weight": [inner, hidden],
            f"{prefix}mlp.down_proj.weight": [hidden, inner],
            f"{prefix}input_layernorm.weight": [hidden],
            f"{prefix}post_attention_layernorm.weight": [hidden],
        }
    shapes["model.norm.weight"] = [hidden]
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_plan_above_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-HET-002: before anything is started, for the main memory and for a card."""
    config = load("quickstart", {"model.path": str(model_folder(tmp_path))})
    assert check_model(config).status == "ok"
    host = Host(
        name="localhost",
        connection="local",
        devices=(Device("cuda", "GPU-1", "small", 1 << 30), Device("cpu", "cpu")),
    )
    monkeypatch.setattr("launcher.job_checks.available_memory", lambda: 1 << 40)
    finding = check_memory(place([host], config, None, SETTING), config, ["localhost"])
    assert finding.status == "fail"
    assert "worker-0 on GPU-1 need" in finding.detail
    cpu = Host(name="localhost", connection="local", devices=(Device("cpu", "cpu"),) * 3)
    plan = place([cpu], config, None, SETTING)
    assert check_memory(plan, config, ["localhost"]).status == "ok"
    monkeypatch.setattr("launcher.job_checks.available_memory", lambda: 4 << 30)
    finding = check_memory(plan, config, ["localhost"])
    assert finding.status == "fail"
    assert "3 CPU workers and the coordinator need" in finding.detail


def test_a_check_that_hangs_or_breaks_costs_one_line() -> None:
    never = threading.Event()

    def hang() -> Finding:
        never.wait()
        return Finding("ok", "")

    def broken() -> Finding:
        raise RuntimeError("oh")

    probes = [
        Probe("share", "intel", hang, deadline=0.5),
        Probe("model", "intel", broken),
        Probe("port", "intel", lambda: Finding("ok", "fine"), deadline=5.0),
    ]
    checks = examine(probes)
    never.set()
    assert [(check.name, check.status) for check in checks] == [
        ("share", "fail"),
        ("model", "fail"),
        ("port", "ok"),
    ]
    assert "no answer within" in checks[0].detail
    assert checks[0].line.startswith("intel: share: no answer")
