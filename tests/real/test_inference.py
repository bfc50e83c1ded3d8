"""SmolLM2-135M computes what transformers computes: tokens, scores, and gradients on wgpu."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import run
from tests.real.data import Described, write_lines
from tests.real.peft_loop import PeftLoop, encode
from tests.trainer.replica import driving
from trainer.config.run import load_config
from trainer.data import tokens
from trainer.distill.answers.folder import AnswersFolder
from trainer.distill.logits.dataset import SHARD_FILE, LogitsFolder
from trainer.model.layout import build_layout
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.replica.wgpu.replica import WgpuReplica

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

PATIENCE = 600.0
QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "Count to ten: 1, 2,")


@pytest.fixture(scope="module")
def published(smollm2: Path) -> Any:
    """Return the model in transformers, fp32."""
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def greedy(smollm2: Path, published: Any) -> list[tuple[list[int], str]]:
    """The ids of each question in the publisher's template, and what transformers answers."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    found: list[tuple[list[int], str]] = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        with torch.no_grad():
            out = published.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
            )
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        found.append((ids[0].tolist(), text))
    return found


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return write_lines(tmp_path / "prompts.jsonl", [{"messages": chat} for chat in chats])


def test_greedy_generation_is_that_of_transformers(
    smollm2: Path, greedy: list[tuple[list[int], str]], asked: Path
) -> None:
    command = [sys.executable, "-m", "trainer.cli", "generate", str(smollm2), "--json"]
    command += ["--data", str(asked), "--max-new-tokens", "24", "--gpu-backend", "cpu"]
    done = run(command, os.environ, PATIENCE)
    assert done.returncode == 0, done.stderr
    completions = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert completions == [text for _, text in greedy]
    assert "Paris" in completions[0]


def use_with(resident: str, model: Path, *words: str) -> str:
    """Run a command with so many resident layers of thirty; return what it prints."""
    command = [sys.executable, "-m", "trainer.cli", *words, "--resident", resident]
    done = run([*command, "--gpu-backend", "cpu", "--threads", "1"], os.environ, PATIENCE)
    assert done.returncode == 0, done.stderr
    line = f"4 of 30 layers stay in memory, 26 are read from {model} at each use"
    assert (line in done.stderr) == (resident == "4")
    return done.stdout


def test_four_resident_layers_give_the_answers_of_all(smollm2: Path, asked: Path) -> None:
    words = ("generate", str(smollm2), "--json", "--data", str(asked), "--max-new-tokens", "12")
    found = [use_with(resident, smollm2, *words) for resident in ("all", "4")]
    assert found[0] == found[1]
    assert "Paris" in found[0]


def test_four_resident_layers_give_a_teachers_scores_of_all(
    smollm2: Path, sections: list[Described], tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "texts.jsonl", [{"text": row.text} for row in sections[:6]])
    words = ("distill", "teacher", str(smollm2), "--data", str(data), "--max-seq-len", "64")
    found: list[list[bytes]] = []
    for resident in ("all", "4"):
        output = tmp_path / resident
        use_with(resident, smollm2, *words, "--dtype", "float32", "--out", str(output))
        found.append([path.read_bytes() for path in sorted(output.rglob(SHARD_FILE))])
    assert found[0] == found[1] != []


def test_a_teachers_answers_are_those_of_transformers(
    smollm2: Path, greedy: list[tuple[list[int], str]], asked: Path, tmp_path: Path
) -> None:
    """Of prompts in the publisher's own template."""
    output = tmp_path / "answers"
    command = [sys.executable, "-m", "trainer.cli", "distill", "generate", str(smollm2)]
    command += ["--prompts", str(asked), "--out", str(output), "--temperature", "0"]
    command += ["--max-new-tokens", "24", "--dtype", "float32", "--gpu-backend", "cpu"]
    done = run(command, os.environ, PATIENCE)
    assert done.returncode == 0, done.stderr
    folder = AnswersFolder(output)
    answers = [each for plan in folder.plans for each in folder.read_shard(plan.number)]
    assert [(each.tokens[: each.prompt_length].tolist(), each.text) for each in answers] == greedy


def test_a_teachers_scores_are_those_of_transformers(
    smollm2: Path, published: Any, sections: list[Described], tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "texts.jsonl", [{"text": row.text} for row in sections[:6]])
    output = tmp_path / "logits"
    command = [sys.executable, "-m", "trainer.cli", "distill", "teacher", str(smollm2)]
    command += ["--data", str(data), "--out", str(output), "--values", "float32"]
    command += ["--dtype", "float32", "--tail-samples", "0", "--max-seq-len", "64"]
    done = run([*command, "--gpu-backend", "cpu", "--threads", "1"], os.environ, PATIENCE)
    assert done.returncode == 0, done.stderr
    folder, seen = LogitsFolder(output), 0
    for shard in folder.description.shards:
        for window in folder.read_shard(shard.number):
            ids = torch.from_numpy(window.tokens.astype(np.int64))[None]
            with torch.no_grad():
                expected = published(input_ids=ids).logits[0].double().log_softmax(-1)
            scores = window.scores
            assert scores.logprobs is not None
            for at in range(1, len(window.tokens)):
                part = slice(scores.offsets[at], scores.offsets[at + 1])
                kept = expected[at - 1][torch.from_numpy(scores.ids[part].astype(np.int64))]
                np.testing.assert_allclose(scores.logprobs[part], kept.numpy(), atol=2e-4)
                likely = expected[at - 1].topk(len(kept)).values
                np.testing.assert_allclose(kept.numpy(), likely.numpy(), atol=2e-4)
                seen += 1
    assert seen > 40


def test_keys_and_values_on_a_vulkan_device_change_no_token(smollm2: Path, vulkan: Adapter) -> None:
    from tests.trainer.distill.teacher.test_kv_offload import generator_for, written
    from trainer.planning.vulkan_buffers import KVShape
    from trainer.replica.wgpu.generation.kv_store import KVStore

    torch.set_num_threads(1)
    generator = generator_for(smollm2)
    expected, logits = written(generator, new=24)
    generator.store = KVStore(Device(vulkan), KVShape(9, 3, 64), range(30))
    found, with_store = written(generator, new=24)
    error = max(abs(a - b).max() for a, b in zip(with_store, logits, strict=True))
    print(f"off by {error:.1e}")
    assert found == expected
    assert error < 1e-4


def test_gradients_on_wgpu_are_within_1e_5_of_float64(
    first_layers: Path, sections: list[Described], vulkan: Adapter
) -> None:
    """The head's backward adds up 49,152 classes."""
    torch.set_num_threads(1)
    row = min(sections[:100], key=lambda row: len(row.text)).conversation
    settings = {"model.path": str(first_layers), "data.train": "none.jsonl", "task": "causal-lm"}
    config = load_config(None, settings)
    (encoded,) = encode(first_layers, [row], 96)
    weights = driving.drawn_weights(first_layers, config)
    loop = PeftLoop(first_layers, config, torch.float64)
    loop.write(weights)
    loss, _ = loop.backward([encoded])
    expected = loop.gradient()
    del loop

    replica = WgpuReplica(first_layers, config, build_layout(first_layers, config), Device(vulkan))
    replica.write_trainable(weights)
    ids, labels = (part[0].numpy().astype(np.int32) for part in (encoded.ids, encoded.labels))
    sample = tokens.Encoded(ids, labels)
    found, result, _ = driving.gradient(replica, [sample])
    assert result.loss_sum == pytest.approx(loss, rel=1e-5)
    error = driving.relative(found, expected)
    print(f"off by {error:.1e}")
    assert error < 1e-5
