"""Other causal language models of transformers train as there and in PEFT, or are refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from tests.trainer.replica.test_families import (
    check_adapter,
    pytestmark,
    their_gradient,
    their_loss,
    theirs,
    write_trained,
)
from tests.trainer.replica.unlisted_models import SEES, write_tiny
from trainer.model.families import FAMILIES, PLAIN
from trainer.model.family_refusals import FULL_REFUSED, INSEPARABLE, REFUSED, RENAMED
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.planning import stored_layers
from trainer.planning.model_config import check_folder_trains
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.replica import residence
from trainer.replica.torch.layer_major import run_in_turn
from trainer.replica.torch.linear import LoraLinear
from trainer.replica.torch.streaming import StreamedHead
from trainer.replica.torch.unlisted_family import check_class
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

__all__ = ["pytestmark"]

TRAINS = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "bamba", "bart", "beam", "bigbird_pegasus"),
    *("bitnet", "blenderbot", "blenderbot-small", "bloom", "codegen", "cohere", "cohere2_moe"),
    *("cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("diffllama", "doge", "dots1", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "gemma4_text"),
    *("gemma4_unified_text", "glm", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt-sw3"),
    *("gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "lfm2_moe", "lfm3"),
    *("llama4_text", "longcat_flash", "mamba2", "marian", "mbart", "mellum", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "moshi", "mpt", "mvp"),
    *(
        "nanochat",
        "nemotron",
        "olmo",
        "olmo_hybrid",
        "olmoe",
        "openai-gpt",
        "opt",
        "pegasus",
        "persimmon",
        "phi",
    ),
    *("phimoe", "plbart", "qwen2_moe", "seed_oss", "solar_open", "stablelm", "starcoder2"),
    *("vaultgemma", "xglm", "xlstm", "youtu", "zamba", "zamba2", "zaya"),
    *("inkling_text", "minicpm3", "qwen4_exp_text", "recurrent_gemma", "phi4_multimodal"),
)
MERGED = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "dt_proj"),
    "gemma3n_text": "correction_coefs",
}
"""Whose classes read the weights of such linears themselves."""
_RENAMED = "of its files when it loads them, so that no adapter has its name; "
_NO_TABLE = "has a row for each of vocab_size tokens, as an embedding has"
BY_FILES: dict[str, str] = {
    **dict.fromkeys(RENAMED, _RENAMED),
    **dict.fromkeys(("cpmant", "inkling2_text", "rembert", "rwkv"), _NO_TABLE),
    "hrm_text": "2 layers lie in no single list of modules, but in model.H_module.layers",
    "xlm": "2 layers lie in no single list of modules, but in transformer.attentions",
}
"""Why those are refused that the table of refusals does not have."""
BY_CLASS = {
    **dict.fromkeys(REFUSED, "not by a linear lm_head on its hidden states"),
    "prophetnet": "ProphetNetForCausalLM makes its logits by more than its head",
}
"""What the classes of the table of refusals do."""
UNBUILT = ("blt", "gemma4_assistant", "gemma4_unified_assistant")
"""Refused by what they are: no small model of these is built."""
ENCODERS = ("musicgen", "musicgen_melody")
OWN_PRODUCTS = ("dbrx", "falcon", "jetmoe", "llama4_text", "longcat_flash")
"""Whose classes multiply most weights of a layer by code of their own."""
PATHS = ("gemma4_text", "gpt_neo", "granitemoehybrid", "olmoe", "phi")
"""A tied head and buffers in files, no gate, recurrent layers, experts, a head with a bias."""


@pytest.mark.long
@pytest.mark.parametrize("model_type", TRAINS)
def test_a_step_is_that_of_transformers_and_peft(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    model = theirs(write_trained(tmp_path / "out", folder, config, layout, weights), folder, config)
    batch = tiny.batch(6, "causal-lm")
    loss = their_loss(model, batch)
    loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    mine, found, _ = gradient(start(folder, config)[0], batch)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert relative(mine, their_gradient(model, layout)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*TRAINS, *MERGED])
def test_layers_and_heads_that_are_read_train_as_resident_ones(
    tiny: Tiny, tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group of micro-batches, unless layers pass more than hidden states on."""
    monkeypatch.setattr(stored_layers, "HEAD_ELEMENTS", 32 * 64)
    folder, batch = write_tiny(tmp_path / "model", model_type), tiny.batch(3, "causal-lm")
    own: dict[str, Any] = {"lora__lora_rank": 4, "training__micro_batch_size": 1}
    config = tiny.config(folder, task="causal-lm", **own)
    streamed = config.with_settings({"model.resident": 0})
    if model_type in (*OWN_PRODUCTS, "zamba"):
        shared = "has no tensors of its name"  # of Zamba, whose layers share weights
        why = shared if model_type == "zamba" else "is of neither linears nor experts"
        with pytest.raises(InputError, match=why):
            start(folder, streamed)
        return
    replica, _ = start(folder, streamed)
    whole, read = gradient(start(folder, config)[0], batch), gradient(replica, batch)
    assert read[1].loss_sum == pytest.approx(whole[1].loss_sum, rel=1e-6)
    assert relative(read[0], whole[0]) < 1e-5  # experts with adapters: in another order
    in_groups = replica._run_layers is not run_in_turn
    assert in_groups == (model_type not in INSEPARABLE)
    replica._run_layers = run_in_turn
    again = gradient(replica, batch)
    assert again[1].loss_sum == read[1].loss_sum
    assert np.array_equal(again[0], read[0])
    monkeypatch.setattr(residence, "stream_head", lambda _found, plan, *_: plan(HEAD_STREAMED))
    replica, _ = start(folder, streamed)
    head: Any = replica._model.lm_head  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(head, StreamedHead)
    found = gradient(replica, batch)
    assert (found[0].tobytes(), found[1].loss_sum) == (read[0].tobytes(), read[1].loss_sum)


@pytest.mark.long
@pytest.mark.parametrize("model_type", MERGED)
def test_a_class_that_reads_weights_itself_trains_as_its_merged_model(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    """PEFT leaves such an adapter out, but for the merged weights."""
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    adapter = write_trained(tmp_path / "out", folder, config, layout, weights)
    batch = tiny.batch(6, "causal-lm")
    _, found, _ = gradient(start(folder, config)[0], batch)
    assert re.search(f"merge before use with PEFT.*{MERGED[model_type]}", caplog.text)
    model = theirs(adapter, folder, config)
    apart = their_loss(model, batch).item()
    merged = their_loss(model.merge_and_unload(), batch).item()
    assert found.loss_sum == pytest.approx(merged, rel=1e-6)
    if model_type != "gemma3n_text":  # small coefficients, which its gradient shows
        assert found.loss_sum != pytest.approx(apart, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("model_type", PATHS)
def test_adapters_and_whole_models_are_read_back(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    """All that is done with a listed family is done with these, which differ in structure."""
    folder = write_tiny(tmp_path / "model", model_type)
    check_adapter(tiny, folder, tmp_path)
    batch = tiny.batch(6, "causal-lm")
    config = tiny.config(folder, task="causal-lm", method="full")
    if model_type in FULL_REFUSED:
        with pytest.raises(InputError, match=r"method full: its .*; set method lora"):
            build_layout(folder, config)
        return
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    trained = write_trained(tmp_path / "full", folder, config, layout, weights)
    model = theirs(trained, folder, config)
    loss = their_loss(model, batch)
    loss.backward()
    replica, _ = start(folder, config)
    mine, found, _ = gradient(replica, batch)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert replica.evaluate(batch).loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert relative(mine, their_gradient(model, layout)) < 1e-5
    quantised = tiny.config(folder, task="causal-lm", model__quantization="nf4")
    exact = gradient(start(folder, tiny.config(folder, task="causal-lm"))[0], batch)[0]
    assert 1e-4 < relative(gradient(start(folder, quantised)[0], batch)[0], exact) < 0.5


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*TRAINS, *MERGED])
def test_whole_models_train_or_are_refused_before_they_are_loaded(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm", method="full")
    if model_type in FULL_REFUSED:
        with pytest.raises(InputError, match=FULL_REFUSED[model_type]):
            build_layout(folder, config)
        monkeypatch.setitem(FAMILIES, model_type, replace(FAMILIES[model_type], full_refused=""))
        with pytest.raises(InputError, match="elements of it to train, its files have"):
            start(folder, config)
    elif model_type == "gpt_neox":
        with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
            build_layout(folder, config)
    else:
        start(folder, config)


@pytest.mark.long
@pytest.mark.parametrize("model_type", BY_FILES)
def test_others_are_refused_with_a_reason(tiny: Tiny, tmp_path: Path, model_type: str) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    with pytest.raises(InputError) as refusal:
        build_layout(folder, config)  # no weight is loaded
    assert BY_FILES[model_type] in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(InputError) as planned:
        check_folder_trains(folder, str(folder), "lora")
    assert str(planned.value) == str(refusal.value)


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["hy_v3", "hy_v4", "kimi_linear", "laguna"])
def test_the_linears_that_a_class_does_not_rename_train(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    config = tiny.config(folder, task="causal-lm")
    with pytest.raises(InputError) as refusal:
        build_layout(folder, config)
    reason, _, others = str(refusal.value).partition("; name others: ")
    renamed = re.search(r"renames (\S+) of", reason)
    assert renamed is not None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    paths = [name for name, _ in model.named_modules()]
    assert not any(path.endswith(renamed[1]) for path in paths)
    start(folder, tiny.config(folder, task="causal-lm", lora__target_modules=others.split(", ")))


@pytest.mark.parametrize("model_type", [*REFUSED, *ENCODERS])
def test_what_no_model_of_a_type_can_is_known_without_its_weights(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    tree = {"model_type": model_type, "is_encoder_decoder": model_type in ENCODERS}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    why = REFUSED.get(model_type, "is an encoder with a decoder")
    with pytest.raises(InputError) as refusal:
        build_layout(tmp_path, tiny.config(tmp_path, task="causal-lm"))
    assert f": {model_type} is " in str(refusal.value)
    assert why in str(refusal.value)


@pytest.mark.long
@pytest.mark.parametrize("model_type", [kind for kind in REFUSED if kind not in UNBUILT])
def test_the_table_of_refusals_is_true_of_the_classes(tmp_path: Path, model_type: str) -> None:
    folder = write_tiny(tmp_path / "model", model_type)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if model_type == "deepseek_v4":
        linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        assert not {f"{name}.weight" for name in linears} & read_headers(folder).keys()
        return
    with pytest.raises(InputError, match=BY_CLASS[model_type]):
        check_class(model, folder, (), PLAIN, torch.autocast("cpu", enabled=False))


def test_musicgen_is_an_encoder_with_a_decoder() -> None:
    for model_type in ENCODERS:
        assert transformers.CONFIG_MAPPING[model_type]().is_encoder_decoder


def test_every_family_of_transformers_has_its_place() -> None:
    """A family that comes with another version of transformers has to be looked at."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ALL

    listed = {name for name, family in FAMILIES.items() if family.listed}
    places = [*TRAINS, *MERGED, *BY_FILES, *REFUSED, *ENCODERS, *SEES, "gemma3n"]
    assert listed | {*places} >= set(ALL)
    assert len(places) == len({*places})


class Sees(nn.Module):
    """Attention to all tokens, with what a class of transformers has."""

    def __init__(self, **does: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(300, 16), nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 300, bias=True)
        if does.get("elsewhere"):
            self.head = self.lm_head
            del self.lm_head
        self.model, self.does = self, does

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        x = self.embed(input_ids)
        seen = x.mean(1, keepdim=True) if self.does.get("sees") else x.cumsum(1)
        hidden = self.norm(x + seen)
        if self.does.get("draws"):
            hidden = hidden + torch.rand_like(hidden)
        return SimpleNamespace(
            last_hidden_state=hidden,
            logits=self.lm_head(hidden) * (2 if self.does.get("scales") else 1),
        )


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("sees", "Sees is not causal: a token changes those before it"),
        ("draws", "Sees draws random numbers while it trains"),
        ("scales", "Sees makes its logits by more than its head"),
        ("elsewhere", "Sees makes its logits by head, not by a linear lm_head"),
    ],
)
def test_what_a_class_does_otherwise_is_named(tmp_path: Path, does: str, reason: str) -> None:
    exact = torch.autocast("cpu", enabled=False)
    check_class(Sees(), tmp_path, (), PLAIN, exact)
    with pytest.raises(InputError, match=reason):
        check_class(Sees(**{does: True}), tmp_path, (), PLAIN, exact)
    with pytest.raises(InputError, match=r"embed as Embedding, which gets no adapter"):
        check_class(Sees(), tmp_path, ("embed",), PLAIN, exact)


def test_a_weight_that_is_read_alone_has_its_adapter() -> None:
    torch.manual_seed(0)
    made = LoraLinear(nn.Linear(8, 6), 2, 0.5, torch.device("cpu"))
    nn.init.normal_(made.lora_A.weight)
    nn.init.normal_(made.lora_B.weight)
    x, grads = torch.randn(3, 8), list[tuple[torch.Tensor, ...]]()
    sides = made.lora_A.weight, made.lora_B.weight
    for y in (made(x), nn.functional.linear(x, made.weight, made.bias)):
        grads.append((y, *torch.autograd.grad(y.square().sum(), sides)))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert made.reads_weight
    made.enabled = False
    assert made.weight is made.base_layer.weight


def test_a_type_that_transformers_lacks_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.model("granite"), tmp_path / "model")
    path = folder / "config.json"
    tree = {**json.loads(path.read_text()), "model_type": "mine", "auto_map": {"AutoModel": "x"}}
    path.write_text(json.dumps(tree))
    reason = r"no causal language model of model_type mine; code in a model's folder .* never run"
    with pytest.raises(InputError, match=reason):
        tiny.start(folder, task="causal-lm")
