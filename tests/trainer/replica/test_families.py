"""Every family that transformers' code computes, against transformers and PEFT themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from tests.covering import covering
from tests.families import COMPUTED_HERE
from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.trained_model import load_trained
from trainer.data.encoder import IGNORED
from trainer.model.config_keys import is_dropout
from trainer.model.families import FAMILIES
from trainer.model.hf_export import ADAPTER_FILE, MODEL_FILE, companion_files, iter_file
from trainer.model.layout import GradientLayout, adapted_modules, build_layout
from trainer.replica import backend
from trainer.replica.sampling import Sampling
from trainer.replica.torch.generator import load_generator
from trainer.replica.torch.loader import load_model
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny
    from trainer.config.run import RunConfig
    from trainer.data.tokens import Encoded

OTHERS = [
    name
    for name, family in FAMILIES.items()
    if family.listed and name not in (*COMPUTED_HERE, "qwen3_5", "qwen3_5_moe")
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT's own patterns for stacked experts, which it compares with modules alone and applies.
    pytest.mark.filterwarnings(
        r"ignore:The following (rank|alpha)_pattern keys .*gate_up_proj:RuntimeWarning"
    ),
]


def write_trained(
    folder: Path, base: Path, config: RunConfig, layout: GradientLayout, weights: np.ndarray
) -> Path:
    """Write the files of a checkpoint that other programs read."""
    folder.mkdir()
    for name, content in companion_files(config, base).items():
        pieces = iter_file(content) if isinstance(content, Path) else [content]
        (folder / name).write_bytes(b"".join(pieces))
    tensors = {
        slot.name: weights[slot.start : slot.stop].reshape(slot.shape)
        for slot in layout.iter_tensors()
    }
    name = ADAPTER_FILE if config.method == "lora" else MODEL_FILE
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


def theirs(trained: Path, base: Path, config: RunConfig) -> Any:
    """Return the model as transformers and PEFT open it, without dropout."""
    import peft
    import transformers

    lora = config.method == "lora"
    auto = transformers.AutoModelForCausalLM
    if config.task == "classify":
        auto = transformers.AutoModelForSequenceClassification
    tree = transformers.AutoConfig.from_pretrained(base if lora else trained)
    for key in filter(is_dropout, vars(tree)):
        setattr(tree, key, 0.0)
    tree.num_labels = 5
    model: Any = auto.from_pretrained(base if lora else trained, config=tree)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # as the product does: docs/config.md
    if lora:
        model = peft.PeftModel.from_pretrained(model, trained, is_trainable=True)
    return model.train()


def their_loss(model: Any, batch: Sequence[Encoded]) -> torch.Tensor:
    """Return the summed loss of samples one by one, from the logits that transformers gives."""
    total = torch.zeros(())
    for sample in batch:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        if isinstance(sample.labels, int):
            model.config.pad_token_id = 10**6  # no token: the last one is the sample's last
            logits = model(input_ids=ids, use_cache=False).logits
            total = total + F.cross_entropy(logits.float(), torch.tensor([sample.labels]))
            continue
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        wanted = torch.from_numpy(sample.labels[1:].astype(np.int64))
        total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    return total


def their_gradient(model: Any, layout: GradientLayout) -> np.ndarray:
    """Return the gradient as the layout orders it."""
    found = {
        name.replace(".default", "").replace(".modules_to_save", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    parts = [
        found[name].grad.numpy().reshape(-1)
        for block in layout.blocks
        for name, _, _ in block.parameters
    ]
    assert len(parts) == len(found)
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("model_type", "method", "task"),
    covering(product(OTHERS, ["lora", "full"], ["causal-lm", "classify"]), 2),
)
def test_gradients_and_files_are_those_of_transformers_and_peft(
    tiny: Tiny, tmp_path: Path, model_type: str, method: str, task: str
) -> None:
    folder = tiny.model(model_type, tie_word_embeddings=model_type != "granite")
    config = tiny.config(folder, task=task, method=method)
    if task == "classify" and not FAMILIES[model_type].classifier:
        with pytest.raises(InputError, match="transformers has no classifier"):
            build_layout(folder, config)
        return
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    model = theirs(write_trained(tmp_path / "out", folder, config, layout, weights), folder, config)
    batch = tiny.batch(6, task)
    loss = their_loss(model, batch)
    loss.backward()
    replica, _ = start(folder, config)
    mine, found, _ = gradient(replica, batch)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert relative(mine, their_gradient(model, layout)) < 1e-5
    assert replica.evaluate(batch).loss_sum == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("model_type", OTHERS)
def test_by_default_adapters_are_where_peft_puts_them(tiny: Tiny, model_type: str) -> None:
    """PEFT's `all-linear`: of experts and routers where transformers stacked linears."""
    import peft
    import transformers

    folder = tiny.model(model_type, tie_word_embeddings=model_type != "granite")
    tree = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(tree)
    settings = peft.LoraConfig(
        r=4,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=FAMILIES[model_type].transposed,
    )
    base: Any = peft.get_peft_model(model, settings).base_model
    config = tiny.config(folder, task="causal-lm", lora__lora_rank=4)
    assert sorted(adapted_modules(folder, config)) == sorted(base.targeted_module_names)
    wanted = {
        f"base_model.{name.replace('.default', '')}": tuple(parameter.shape)
        for name, parameter in base.named_parameters()
        if parameter.requires_grad
    }
    assert {slot.name: slot.shape for slot in build_layout(folder, config).iter_tensors()} == wanted
    named = tiny.config(folder, task="causal-lm", lora__target_modules=["experts"])
    with pytest.raises(InputError, match=r"lora\.target_modules: no linear experts"):
        build_layout(folder, named)


@pytest.mark.parametrize("model_type", OTHERS)
def test_packed_rows_and_recomputed_layers_give_the_same_gradient(
    tiny: Tiny, model_type: str
) -> None:
    folder = tiny.model(model_type, tie_word_embeddings=model_type != "granite")
    batch = tiny.batch(6, "causal-lm")
    plain, _, _ = gradient(tiny.start(folder, task="causal-lm")[0], batch)
    pack: dict[str, Any] = {"training__pack": True}
    recompute: dict[str, Any] = {"training__gradient_checkpointing": "on"}
    packs = FAMILIES[model_type].packs
    if not packs:
        with pytest.raises(InputError, match=r"training\.pack: its layers would not keep"):
            build_layout(folder, tiny.config(folder, task="causal-lm", **pack))
    for settings in (pack, recompute) if packs else (recompute,):
        replica, _ = tiny.start(folder, task="causal-lm", **settings)
        assert relative(gradient(replica, batch)[0], plain) < 1e-5


@pytest.mark.parametrize("model_type", OTHERS)
def test_an_adapter_is_read_back_generates_and_merges(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    folder = tiny.model(model_type, tie_word_embeddings=model_type != "granite")
    check_adapter(tiny, folder, tmp_path)


def check_adapter(tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    """Compare an adapter that is read, generates and merges with what PEFT makes of it."""
    import transformers

    config = tiny.config(folder, task="causal-lm", lora__lora_rank=2)
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    adapter = write_trained(tmp_path / "out", folder, config, layout, weights)
    model = theirs(adapter, folder, config).eval()
    trained = load_trained(adapter)
    assert trained.weights is not None
    assert np.array_equal(trained.weights, weights)

    prompts = [[7, 8, 9, 10, 11, 12], [75], [110, 120, 130]]
    wanted: list[list[int]] = []
    model.generation_config = transformers.GenerationConfig()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, pad_token_id=0
        )
        wanted.append(made[0, len(prompt) :].tolist())
    generator = load_generator(folder, config, layout, weights)
    assert generator.generate(prompts, max_new_tokens=5, sampling=Sampling()) == wanted

    folder = merge_adapter(open_adapter(trained.path)[0], tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        found, expected = (one.eval()(input_ids=ids).logits for one in (merged, model))
    assert relative(found.numpy(), expected.numpy()) < 1e-5


@pytest.mark.parametrize("model_type", ["gemma2", "phi3", "mixtral", "gpt2"])
def test_nf4_trains(tiny: Tiny, model_type: str) -> None:
    """The quantised linears are near the others, and adapters learn on them."""
    folder = tiny.model(model_type)
    batch, found = tiny.batch(6, "causal-lm"), dict[str, np.ndarray]()
    for word in ("none", "nf4"):
        found[word] = gradient(
            tiny.start(folder, task="causal-lm", model__quantization=word)[0], batch
        )[0]
    assert 1e-4 < relative(found["nf4"], found["none"]) < 0.5


def test_a_key_that_the_class_does_not_know_is_said(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.model("gemma2", gemma_frobnication=3)
    load_model(folder, tiny.config(folder), torch.device("cpu"))
    (line,) = [line for line in caplog.messages if "config.json" in line]
    assert line == "keys of config.json that are not used: 'gemma_frobnication' (1 time)"


@pytest.mark.usefixtures("vulkan")
def test_wgpu_refuses_the_others_before_anything_loads(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model("gemma2")
    config = tiny.config(folder)
    layout = build_layout(folder, config)
    monkeypatch.setattr(backend, "open_vulkan_device", None)  # opening one would be an error
    reason = "wgpu: layers of gemma2 are computed by transformers' code alone"
    with pytest.raises(InputError, match=reason):
        backend.choose_replica("wgpu", "", folder, config, layout, 1)
    choice = backend.choose_replica("auto", "", folder, config, layout, 1)
    assert choice.backend == "cpu"
    assert reason in choice.reason
