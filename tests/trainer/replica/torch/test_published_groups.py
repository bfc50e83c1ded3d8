"""Groups of micro-batches through the layers of transformers' models."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.covering import covering
from tests.families import FAMILIES as ROWS
from tests.trainer.replica.driving import gradient, taught, train
from tests.trainer.replica.torch.test_published_weights import DENSE, SIZES, TARGETS
from tests.trainer.replica.torch.test_streaming import FORMATS, GROUPS, TASKS, count_reads
from tests.trainer.replica.unlisted_models import write_tiny
from trainer.data.tokens import Encoded
from trainer.replica.torch import objective
from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.published_parts import InseparableLayersError, PublishedParts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

EXACT = torch.autocast("cpu", enabled=False)
TABLE = {"lora__modules_to_save": ["embed_tokens"]}
MORE: dict[str, dict[str, Any]] = {
    **TASKS,
    "embedding": {"task": "causal-lm", **TABLE},
    "embedding-classify": TABLE,
    "experts": {"task": "causal-lm", **TARGETS["experts"]},
}
CASES = [
    *(("qwen3_moe", task, "nf4", 0) for task in MORE if task != "classify"),
    *(("mixtral", task, "nf4", 1) for task in ("causal-lm", "experts", "classify")),
    *(("qwen3_moe", "causal-lm", form, 1) for form in FORMATS if "nf4" not in form),
    ("gpt_oss", "experts", "nf4 of bf16", 1),
    ("gpt_oss", "dpo", "bf16", 0),
    ("qwen3_next", "causal-lm", "nf4 in bf16 products", 0),
    ("qwen3_5_moe_text", "distillation", "fp32", 0),
    ("gemma2", "classify", "fp32", 0),
    ("gemma3_text", "packed", "fp32 in bf16 products", 1),
    ("lfm2", "causal-lm", "bf16", 0),
    ("cohere2", "distillation", "fp32", 1),
    ("phi3", "dpo", "nf4", 1),
    ("granite", "packed", "fp32", 0),
    ("gpt2", "freeze-a", "fp32", 0),
    ("gpt2", "some-layers", "bf16", 1),
    ("mistral", "embedding", "fp32", 0),
]
WAYS = covering((*case, group != "two", group) for case in CASES for group in GROUPS)


def make_folder(tiny: Tiny, family: str, dtype: str = "float32", **sizes: Any) -> Path:
    own: dict[str, Any] = {**{**SIZES, **DENSE}[family], **sizes}
    return tiny.model(family, dtype=dtype, **own)


@pytest.mark.parametrize(("family", "task", "form", "resident", "recompute", "group"), WAYS)
def test_losses_gradients_and_weights_are_those_of_the_resident_run(
    tiny: Tiny, family: str, task: str, form: str, resident: int, recompute: bool, group: str
) -> None:
    """The resident run has three micro-batches, one after the other."""
    dtype, stored = FORMATS[form]
    tied = {"tie_word_embeddings": False} if task.startswith("embedding") else {}
    folder = make_folder(tiny, family, dtype, **tied)
    settings: dict[str, Any] = TARGETS["attention"] if family in SIZES else {}
    settings = settings | MORE[task] | stored
    if task == "some-layers":
        settings["lora__layers_to_transform"] = [1]
    settings |= {"training__gradient_checkpointing": recompute}
    settings |= {"training__micro_batch_size": 2, "lora__lora_rank": 4}
    batch = tiny.batch(5, settings.get("task", "classify"))
    batch = taught(batch) if task == "distillation" else batch
    whole = train(*tiny.start(folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.start(folder, **settings, model__resident=resident)
    replica.split.group_tokens = GROUPS[group]
    assert train(replica, weights, batch) == whole


@pytest.mark.parametrize("family", [*SIZES, *DENSE])
def test_a_group_reads_a_layer_once_in_each_direction(tiny: Tiny, family: str) -> None:
    """And blocks of gradients leave at their layer's turn, in the first half of backward, too."""
    layers, own = 6, dict[str, Any](TARGETS["attention"] if family in SIZES else {})
    sizes: dict[str, Any] = {"num_hidden_layers": layers}
    if "layer_types" in ROWS[family]:
        sizes["layer_types"] = 3 * ROWS[family]["layer_types"]
    folder = make_folder(tiny, family, **sizes)
    own |= {"task": "causal-lm", "model__resident": 0, "training__micro_batch_size": 2}
    replica, _ = tiny.start(folder, **own)
    batch, kept = tiny.batch(6, "causal-lm"), replica.split.group_tokens
    reads: dict[int, int] = {}
    replica.forward_backward(batch, lambda *_: None)
    for tokens in (kept, 0):
        replica.split.group_tokens = tokens
        reads[tokens], first_left = count_reads(replica, batch)
        assert first_left < reads[tokens] - layers / 2
    # At each turn both slots still have the layers that are needed first.
    assert reads[kept] == 2 * (layers - 2)
    assert reads[0] == 3 * reads[kept]


@pytest.mark.parametrize(
    ("family", "packed"), [("qwen3_moe", True), ("qwen3_moe", False), ("gpt_oss", False)]
)
def test_what_waits_in_a_group_is_planned(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, family: str, packed: bool
) -> None:
    """At the first loss: hidden states, and what layers are called with."""
    folder = make_folder(tiny, family, num_hidden_layers=2)
    own: dict[str, Any] = {"task": "causal-lm", "training__gradient_checkpointing": True}
    own |= {"training__micro_batch_size": 1, "data__max_seq_len": 40, "training__pack": packed}
    own |= TARGETS["attention"]
    replica, _ = tiny.start(folder, **own, model__resident=0)
    sample = tiny.batch(1, "causal-lm")[0]
    half = Encoded(sample.input_ids[:20], np.asarray(sample.labels)[:20])
    found: list[int] = []
    computed = objective.language_loss

    def count_first(*given: Any, **more: Any) -> Any:
        tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        kept = (each.untyped_storage() for each in tensors if each.dtype != torch.int64)
        found.append(sum({each.data_ptr(): each.nbytes() for each in kept}.values()))
        return computed(*given, **more)

    monkeypatch.setattr(objective, "language_loss", count_first)
    rows = 2 if packed else 1  # samples of 20 tokens in a row of 40
    gradient(replica, [half] * 2 * rows)
    alone = found[0]
    found.clear()
    gradient(replica, [half] * 8 * rows)
    plan = replica._plan
    hidden = 3 * 4 * 64
    assert hidden < (found[0] - alone) / (6 * rows * 20) <= plan.per_waiting_token
    assert plan.per_waiting_token <= hidden + 8 * 17 + 2 * 40 * (4 if family == "gpt_oss" else 1)


@pytest.mark.parametrize("group", ["all", "two"])
def test_layers_that_pass_more_on_run_micro_batch_by_micro_batch(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, group: str
) -> None:
    caplog.set_level("INFO")
    folder, batch = write_tiny(tmp_path / "model", "gemma3n_text"), tiny.batch(4, "causal-lm")
    own: dict[str, Any] = {"task": "causal-lm", "training__micro_batch_size": 1}
    own |= {"lora__lora_rank": 4, "lora__target_modules": ["q_proj", "v_proj"]}
    whole = train(*tiny.start(folder, **own, model__resident="all"), batch)
    assert "one micro-batch at a time" not in caplog.text
    replica, weights = tiny.start(folder, **own, model__resident=0)
    assert f"{folder}: layers are read for one micro-batch at a time: layer 0 gets" in caplog.text
    assert not replica._plan.per_waiting_token
    replica.split.group_tokens = GROUPS[group]
    assert train(replica, weights, batch) == whole


class Loop(nn.Module):
    """A backbone with a fault: what its loop over layers does beside passing hidden states on."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList([Step(does) for _ in range(3)])
        self.does = does

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        start = x = self.embed(input_ids)
        layers = [*self.layers] * (2 if self.does == "twice" else 1)
        for layer in reversed(layers) if self.does == "reversed" else layers:
            match self.does:
                case "first":
                    found = layer(start)
                case "state":
                    found = layer(x, {})
                case "trains":
                    found = layer(x, self.norm.weight)
                case "keyword":
                    found = layer(hidden_states=x, more=(None, x.detach()))
                case _:
                    found = layer(x)
            if self.does == "unpacks":
                x, _ = found
            else:
                x = found[0] if self.does in ("tuples", "lists") else found
            x = 2 * x if self.does == "scales" else x
        return SimpleNamespace(last_hidden_state=self.norm(x + start * (self.does == "adds")))


class Step(nn.Module):
    """A layer."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(8, 8), does

    def forward(self, hidden_states: torch.Tensor, more: Any = None) -> Any:
        assert (more is None) == (self.does not in ("state", "trains", "keyword"))
        found = hidden_states + self.linear(hidden_states).tanh()
        if self.does == "lists":
            return [found]
        return (found, None) if self.does in ("tuples", "unpacks") else found


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("first", "a layer's input is not the output of the one before it"),
        ("scales", "a layer's input is not the output of the one before it"),
        ("twice", "layers do not run once each, in their order"),
        ("reversed", "layers do not run once each, in their order"),
        ("state", "layer 0 gets a dict, which others may change"),
        ("trains", "layer 0 gets more than hidden states that has a gradient"),
        ("unpacks", "layers pass on more than hidden states"),
        ("adds", "what follows the layers takes more than the last one's output"),
    ],
)
def test_what_a_loop_does_beside_is_named(does: str, reason: str) -> None:
    model = nn.Module()
    model.model = Loop(does)
    with pytest.raises(InseparableLayersError, match=f"^{reason}$"):
        PublishedParts(model, EXACT)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize("does", ["", "tuples", "lists", "keyword"])
def test_a_plain_loop_is_its_parts_one_after_the_other(does: str) -> None:
    model = nn.Module()
    model.model = Loop(does)
    parts = PublishedParts(model, EXACT)
    assert parts.trains_embedding
    ids = torch.arange(10).view(2, 5)
    micro = MicroBatch(ids, ids, ids)
    hidden, calls = parts.embed_tokens(micro)
    for number, call in enumerate(calls):
        hidden = parts.run_layer(number, hidden, call)
    assert torch.equal(
        parts.run_remainder(hidden, micro), model.model(ids, False).last_hidden_state
    )
