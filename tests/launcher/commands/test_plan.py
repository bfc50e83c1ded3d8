"""`launch plan`: a table and a pick, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.cli import run
from tests.launcher.hollow_model import make_model
from trainer.config.run import load_config
from trainer.model.layout import build_layout
from trainer.system.errors import InputError
from trainer.system.storage.atomic_folder import Disk, FolderWriter

CARDS = ("--cluster", "2xRTX4090")


def test_a_table_and_a_pick(capsys: pytest.CaptureFixture[str]) -> None:
    prices = ("--price-kwh", "0.3", "--currency", "EUR")
    assert run(["plan", "--shape", "7b", *CARDS, *prices]) == 0
    shown = capsys.readouterr().out
    assert "7b: 6.74 billion parameters; lora; 2 RTX4090" in shown
    for title in ("DDP", "ZeRO-2", "FSDP2", "TP2+SP", "PP2 zbv", "DiLoCo", "Motley", "DDP QLoRA"):
        assert title in shown
    assert "EUR" in shown
    told = shown.splitlines()[-4:]
    assert told[0].startswith("FSDP2 fits in 18.6 of ")
    assert told[0].endswith(" GiB, 1.5 times as fast as DDP, which must recompute.")
    assert told[1:] == [
        "Why: a step of FSDP2 takes 7.41 s, one of DDP 10.9 s.",
        "next:",
        "  torchrun --nproc-per-node 2 -m trainer finetune --distributed DIR --data FILE"
        " --set parallel.data=fsdp",
    ]
    (marked,) = [line for line in shown.splitlines() if "<-" in line]
    assert marked.split()[:2] == ["FSDP2", "<-"]


def test_unlike_devices_start_by_launch_with_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_model(tmp_path))
    cards = ("--cluster", "1xRTX3090; 1xRTX4090, 10gbit")
    assert run(["plan", "--model", folder, *cards]) == 0
    shown = capsys.readouterr().out.splitlines()
    start = f"  launch cluster up --model {folder} --data FILE"
    assert shown[-2:] == ["next:", f"{start} --set exchange.codec=auto"]
    heading = next(line for line in shown if line.startswith("STRATEGY"))
    assert "KWH" in heading
    for column in ("COST", "BUBBLE"):
        assert column not in heading, "a column of dashes alone"


def test_rounds_start_with_the_codec_that_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    slow = "1xRTX3090; 1xRTX4090, 50mbit, 20ms, half duplex"
    assert run(["plan", "--shape", "qwen3-4b", "--cluster", slow, "--tokens", "50M"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-3].endswith(" %; rounds want twice the learning rate.")
    settings = ("schedule=rounds", "inner_steps=17", "codec=int4")
    assert shown[-1].endswith("".join(f" --set exchange.{each}" for each in settings))


def test_layers_that_are_read_at_each_use_are_listed_by_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unlike = "lambda: RTX4090 64GB; intel: 2xW5700X 300GB, CPU28; 1gbit"
    asked = ["plan", "--shape", "qwen3-32b", "--method", "qlora", "--cluster", unlike]
    assert run(asked) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Motley bf16 streamed .* yes ", shown)
    streamed = r"\d+ of 64 layers resident, \d+ streamed from memory at 25 GB/s; free"
    for pool in ("lambda: RTX4090", "intel: 2 W5700X"):
        assert re.search(f"{pool}: {streamed}", shown), shown
    assert "not yet" not in shown
    assert "intel: CPU, 28 cores: all layers resident; " in shown
    assert run([*asked, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    (option,) = [one for one in tree["options"] if one["workers"]]
    assert (option["strategy"], option["fits"]) == ("motley-streamed", True)
    card, radeon, processor = option["workers"]
    assert (card["layers"], card["reading"]["source"], radeon["count"]) == (64, "memory", 2)
    assert processor["resident"] == 64
    assert processor["reading"] is processor["refusal"] is None


def test_layers_that_no_engine_reads_are_not_planned_yet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "--shape", "qwen3-30b-a3b", "--method", "qlora", "--length", "512"]
    assert run([*asked, "--cluster", "intel: 2xW5700X 300GB"]) == 4
    shown = capsys.readouterr().out
    assert re.search(r"Motley fp32 streamed .* not yet ", shown)
    assert "not yet: wgpu computes no mixtures of experts\n" in shown
    assert "of a mixture of experts, CUDA devices and processors read them at each use" in shown


def test_reading_and_products_are_measured_where_layers_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of twice this machine's memory, whose weights are a hole of the file."""
    layers = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (180 << 20)
    folder = str(make_model(tmp_path, layers=layers))
    asked = ["plan", "--model", folder, "--length", "64", "--rank", "1", "--adapted-layers", "1"]
    devices = "\"[{'backend': 'cpu'}]\""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost ansible_connection=local motley_devices={devices}\n")
    assert run([*asked, "--inventory", str(hosts)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"note: CPU, \d+ cores: products at [\d.e+]+ GFLOP/s, measured\n", shown)
    assert "are assumed" not in shown
    streamed = rf"one device streamed: CPU, \d+ cores: \d+ of {layers} layers resident, \d+"
    assert re.search(streamed + r" streamed from the disk at [\d.e+]+ GB/s; free", shown), shown


def test_a_model_folder_is_read_by_its_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_model(tmp_path))
    assert run(["plan", "--model", folder, *CARDS, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["schema"] == "motley.strategies/2"
    assert tree["model"]["note"] == ""
    assert tree["recommended"] in [option["strategy"] for option in tree["options"]]
    for option in tree["options"]:
        assert option["total_bytes"] == pytest.approx(sum(option["bytes_by_part"].values()))
        assert option["fits"] == (option["total_bytes"] <= option["available_bytes"])
    link = tmp_path / "mine"  # the folder of a GGUF file is elsewhere, too
    link.symlink_to(folder)
    assert run(["plan", "--model", str(link), *CARDS]) == 0
    assert capsys.readouterr().out.startswith("mine: ")
    (tmp_path / "config.json").unlink()
    assert run(["plan", "--model", folder, *CARDS]) == 0
    assert "no config.json: sizes are read from the weights' headers" in capsys.readouterr().out


def test_a_run_is_planned_by_its_base_or_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `evaluate` takes it: the output folder, a checkpoint or the adapter to publish."""
    (tmp_path / "base").mkdir()
    base = make_model(tmp_path / "base")
    output, settings = tmp_path / "output", {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (output / "checkpoints").mkdir(parents=True)
    writer = FolderWriter(Disk(), output / "checkpoints", "step-000003")
    named = {**settings, "base_model_name_or_path": str(base)}
    writer.write_file("adapter_config.json", [json.dumps(named).encode()])
    checkpoint = writer.publish()
    for given in (output, checkpoint):
        assert run(["plan", "--model", str(given), *CARDS, "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["model"]["name"] == "base"
        assert shown.err == f"{given} is an adapter; its base is planned: {base}\n"
    (checkpoint / "adapter_config.json").write_text(json.dumps(settings))
    assert run(["plan", "--model", str(checkpoint), *CARDS]) == 2
    assert "names no base model" in capsys.readouterr().err
    (checkpoint / "manifest.json").unlink()
    assert run(["plan", "--model", str(output), *CARDS]) == 2
    assert "contains no intact checkpoint" in capsys.readouterr().err


def test_an_unknown_architecture_is_planned_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    tree = {"model_type": "mamba9", "vocab_size": 1000, "intermediate_size": 2048, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert run(["plan", "--model", str(tmp_path), "--cluster", "1xT4"]) == 0
    assert "architecture mamba9 is not known here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tree", "method"),
    [
        ({"model_type": "bert"}, "lora"),
        ({"model_type": "bert"}, "qlora"),
        ({"model_type": "bert"}, "full"),
        ({"model_type": "deepseek_v3"}, "full"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "lora"),
        ({"model_type": "qwen3", "quantization_config": {"bits": 4}}, "lora"),
    ],
)
def test_what_does_not_train_is_refused_as_by_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, Any], method: str
) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    tree = {"vocab_size": 1000, "intermediate_size": 2048, **sizes, **tree}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    given = {"model.path": str(tmp_path), "data.train": "none", "task": "causal-lm"}
    config = load_config(None, {**given, "method": "full" if method == "full" else "lora"})
    with pytest.raises(InputError) as refusal:
        build_layout(tmp_path, config)
    asked = ["plan", "--model", str(tmp_path), "--cluster", "1xT4"]
    assert run([*asked, "--method", method]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"launch: {refusal.value}\n"
    assert shown.out == ""
    # A teacher does not train, its student does.
    assert run([*asked, "--distill"]) == 0
    if method != "full":
        student = ["plan", "--shape", "7b", "--cluster", "1xT4", "--distill"]
        capsys.readouterr()
        assert run([*student, "--student", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"launch: {refusal.value}\n"


@pytest.mark.parametrize(
    ("model_type", "renamed"),
    [("axk2", "self_attn.q_b_proj"), ("laguna", "mlp.shared_expert.up_proj")],
)
def test_linears_that_transformers_renames_are_refused_as_by_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str, renamed: str
) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    tree = {"model_type": model_type, "intermediate_size": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    asked = ["plan", "--model", str(tmp_path), "--cluster", "1xT4"]
    # By its config alone only the kind is known: it is named, and others of its linears may train.
    assert run(asked) == 0
    assert f"transformers renames linears of {model_type} (" in capsys.readouterr().out
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        f"model.layers.0.{renamed}.weight": (8, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        "model.norm.weight": (8,),
        "lm_head.weight": (16, 8),
    }
    save_file(
        {name: np.ones(shape, np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    given = {"model.path": str(tmp_path), "data.train": "none", "task": "causal-lm"}
    with pytest.raises(InputError, match=f"renames {renamed} of its files") as refusal:
        build_layout(tmp_path, load_config(None, given))
    for method in ("lora", "qlora"):
        assert run([*asked, "--method", method]) == 2
        assert capsys.readouterr().err == f"launch: {refusal.value}\n"


def test_of_an_adapter_b_may_train_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[dict[str, float]] = []
    for flags in ((), ("--freeze-a",)):
        assert run(["plan", "--shape", "7b", *CARDS, *flags, "--json"]) == 0
        options = json.loads(capsys.readouterr().out)["options"]
        sizes += [option["bytes_by_part"] for option in options if option["strategy"] == "ddp"][:1]
    both, b = (each["gradients"] for each in sizes)
    rows, columns = 4 * 4096 + 2 * 11008 + 4096, 6 * 4096 + 11008
    assert b / both == pytest.approx(rows / (rows + columns))
    assert sizes[1]["weights"] == sizes[0]["weights"], "A is there as before"


def test_formulas_with_their_numbers_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--shape", "7b", *CARDS, "--explain", "fsdp"]) == 0
    shown = capsys.readouterr().out
    assert "= 6,476,005,376 * (2 / 2 + 0)" in shown
    assert "Zhao et al., arXiv 2304.11277" in shown
    assert run(["plan", "--shape", "7b", *CARDS, "--explain", "magic"]) == 2
    assert "it has ddp, zero-1," in capsys.readouterr().err


def test_ddp_over_four_devices_names_the_setting_that_runs_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ring = "launch cluster up --set exchange.topology=ring"
    for devices, named in ((4, True), (2, False)):
        cluster = f"{devices}xRTX4090"
        assert run(["plan", "--shape", "7b", "--cluster", cluster, "--explain", "ddp"]) == 0
        assert (ring in capsys.readouterr().out) == named


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--shape", "405b", "--cluster", "1xT4"]) == 4
    shown = capsys.readouterr()
    assert "Nothing fits: " in shown.out
    assert shown.err == "launch: no strategy fits these devices\n"
    (row,) = [line for line in shown.out.splitlines() if line.startswith("one device  ")]
    assert "1,569" in row.split(), "seconds without an exponent"
    heading = next(line for line in shown.out.splitlines() if line.startswith("STRATEGY"))
    assert not {"COMM", "BUBBLE"} & set(heading.split()), "one device has neither"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*CARDS], "give either --model DIR|NAME or --shape NAME"),
        (["--shape", "7b", "--model", "x", *CARDS], "give either --model"),
        (["--shape", "8x", *CARDS], "--shape 8x: unknown; known: 1b, 7b"),
        (["--model", "absent/", *CARDS], "no model folder absent/"),
        (["--shape", "7b", "--cluster", "1xRTX4091"], "unknown device RTX4091"),
        (["--shape", "7b", "--cluster", ""], "--cluster: cannot read ''"),
        (["--shape", "7b", "--cluster", "1xT4, 2 hosts"], "no link between them"),
        (["--shape", "7b", *CARDS, "--price-kwh", "1"], "needs its currency"),
        (["--shape", "7b", *CARDS, "--price-kwh", "-1", "--currency", "EUR"], "x>=0"),
        (["--shape", "7b", *CARDS, "--tokens", "many"], "is not a number of tokens"),
        (["--shape", "7b", *CARDS, "-i", "hosts.yml"], "not both"),
        (["--shape", "7b", "--link", "fast"], "is not a rate"),
        (["--shape", "7b", "--link", "1gbit"], "--link 1gbit: needs two hosts"),
        (["--shape", "7b", "--link", "1gbit", *CARDS], "is between hosts, and --cluster has one"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_config_with_a_wrong_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    assert run(["plan", "--model", str(tmp_path), *CARDS]) == 2
    assert "hidden_size must be a positive integer, got 'wide'" in capsys.readouterr().err


def test_an_offline_machine_does_not_ask_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert run(["plan", "--model", "owner/name", *CARDS]) == 2
    assert "downloads are disabled on this machine" in capsys.readouterr().err
    home = tmp_path / "hub/models--owner--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("abc")
    snapshot = home / "snapshots/abc"
    snapshot.mkdir(parents=True)
    tree = json.loads((make_model(snapshot) / "config.json").read_text())
    assert tree["model_type"] == "qwen3"
    assert run(["plan", "--model", "owner/name", *CARDS]) == 0


def test_precision_and_checkpointing_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--precision", "fp32", "--gradient-checkpointing", "on", "--json")
    run(["plan", "--shape", "1b", *CARDS, *flags])
    tree = json.loads(capsys.readouterr().out)
    assert tree["precision"] == "fp32"
    assert {option["recompute"] for option in tree["options"]} == {"full"}


@pytest.mark.parametrize("command", [["plan", "--shape", "7b", *CARDS], ["budget"]])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--currency", "eur"),
        ("--currency", "EURO"),
        ("--price-kwh", "nan"),
        ("--price-hour", "inf"),
    ],
)
def test_prices_are_numbers_and_currencies_codes(
    command: list[str], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ["--", "true"] if command == ["budget"] else []
    assert run([*command, option, value, *end]) == 2
    said = capsys.readouterr().err
    assert option in said
    assert value in said
