"""The layout names and orders exactly what transformers and PEFT train."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.families import COMPUTED_HERE
from trainer.model.hf_export import adapter_config
from trainer.model.layout import GradientLayout, build_layout
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel

ARCHITECTURES = COMPUTED_HERE


def shapes(layout: GradientLayout) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.shape for slot in layout.iter_tensors()}


# peft 0.21 asks transformers 5.23 by a deprecated name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("task", ["classify", "causal-lm"])
def test_lora_names_are_what_peft_saves(
    tiny_model: TinyModel, make_config: MakeConfig, model_type: str, task: str
) -> None:
    import peft
    import transformers

    folder = tiny_model(model_type)
    config = make_config(folder, task=task, lora__lora_rank=3)
    auto = (
        transformers.AutoModelForSequenceClassification
        if task == "classify"
        else transformers.AutoModelForCausalLM
    )
    settings = peft.LoraConfig(
        task_type="SEQ_CLS" if task == "classify" else "CAUSAL_LM",
        r=3,
        target_modules=list(config.lora.linears),
    )
    base = auto.from_pretrained(folder, **({"num_labels": 5} if task == "classify" else {}))
    saved = peft.get_peft_model_state_dict(peft.get_peft_model(base, settings))
    assert shapes(build_layout(folder, config)) == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_some_layers_get_adapters_as_in_peft(
    tiny_model: TinyModel, make_config: MakeConfig, model_type: str
) -> None:
    import peft
    import transformers

    folder = tiny_model(model_type)
    config = make_config(folder, task="causal-lm", lora__layers_to_transform=[1])
    tree = adapter_config(config, folder)
    settings = peft.LoraConfig(**{key: tree[key] for key in tree if key != "peft_type"})
    settings.inference_mode = False
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    saved = peft.get_peft_model_state_dict(peft.get_peft_model(base, settings))
    layout = build_layout(folder, config)
    assert shapes(layout) == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert [block.name for block in layout.blocks] == ["layers.1"]
    missing = make_config(folder, task="causal-lm", lora__layers_to_transform=[1, 2])
    with pytest.raises(InputError, match="the model has layers 0 to 1, no 2"):
        build_layout(folder, missing)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("task", ["classify", "causal-lm"])
@pytest.mark.parametrize("tied", [True, False])
def test_full_names_are_the_trainable_state_dict(
    tiny_model: TinyModel, make_config: MakeConfig, model_type: str, task: str, tied: bool
) -> None:
    import transformers

    folder = tiny_model(model_type, tie_word_embeddings=tied)
    auto = (
        transformers.AutoModelForSequenceClassification
        if task == "classify"
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_pretrained(folder, **({"num_labels": 5} if task == "classify" else {}))
    # named_parameters leaves a tied head out, as the layout must.
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    layout = build_layout(folder, make_config(folder, method="full", task=task))
    assert shapes(layout) == expected
    assert ("lm_head.weight" in shapes(layout)) == (task == "causal-lm" and not tied)


@pytest.mark.parametrize("flags", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_of_llama(
    tiny_model: TinyModel, make_config: MakeConfig, flags: dict[str, bool]
) -> None:
    folder = tiny_model("llama", **flags)
    names = shapes(build_layout(folder, make_config(folder, method="full")))
    assert ("model.layers.1.self_attn.o_proj.bias" in names) == ("attention_bias" in flags)
    assert ("model.layers.1.mlp.down_proj.bias" in names) == ("mlp_bias" in flags)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_digest_is_the_same_however_the_base_was_saved(
    tiny_model: TinyModel, make_config: MakeConfig, method: str
) -> None:
    folders = [
        tiny_model(),
        tiny_model(saved_as="classify"),
        tiny_model(saved_as="bare"),
        tiny_model(dtype="bfloat16"),
        tiny_model(shard="100KB"),
    ]
    assert len(list(folders[-1].glob("*.safetensors"))) > 1
    digests = {
        build_layout(folder, make_config(folder, method=method)).digest for folder in folders
    }
    assert len(digests) == 1


def test_blocks_are_contiguous_and_leave_in_reverse(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model(tie_word_embeddings=False)
    layout = build_layout(folder, make_config(folder, method="full", task="causal-lm"))
    assert [block.name for block in layout.blocks] == [
        "layers.0",
        "layers.1",
        "norm",
        "head",
        "embedding",
    ]
    assert layout.send_order == (1, 0, 3, 2, 4)
    offset = 0
    for index, block in enumerate(layout.blocks):
        assert (block.index, block.start) == (index, offset)
        for slot in block.tensors:
            assert slot.start == offset
            offset = slot.stop
        assert block.stop == offset
    assert layout.size == offset
    slot = layout.blocks[1].tensors[2]
    inside = slot.start - layout.blocks[1].start
    assert layout.find_tensor(1, inside) == slot
    assert layout.find_tensor(1, inside + slot.size - 1) == slot
    with pytest.raises(IndexError):
        layout.find_tensor(1, layout.blocks[1].size)


def test_the_order_of_target_modules_does_not_matter_but_shapes_do(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model()

    def digest(**settings: object) -> str:
        return build_layout(folder, make_config(folder, **settings)).digest

    assert digest(lora__target_modules=["q_proj", "v_proj"]) == digest(
        lora__target_modules=["v_proj", "q_proj"]
    )
    different = [
        digest(),
        digest(lora__lora_rank=4),
        digest(num_classes=4),
        digest(lora__target_modules=["q_proj"]),
        digest(task="causal-lm"),
        digest(method="full"),
    ]
    assert len(set(different)) == len(different)


def edited(folder: Path, target: Path, **settings: object) -> Path:
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            r"config\.json: t5 is an encoder with a decoder; what trains is a causal language",
        ),
        ({"model_type": None}, r"config\.json: model_type must be a string, got None"),
        ({"hidden_size": 128}, r"has shape \[.*config\.json says"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is missing"),
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
        ({"quantization_config": {}}, "stored quantised"),
    ],
)
def test_models_that_do_not_fit(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    tmp_path: Path,
    settings: dict[str, object],
    message: str,
) -> None:
    folder = edited(tiny_model(), tmp_path / "model", **settings)
    with pytest.raises(InputError, match=message) as caught:
        build_layout(folder, make_config(folder))
    assert "\n" not in str(caught.value)


def test_head_of_another_size(tiny_model: TinyModel, make_config: MakeConfig) -> None:
    folder = tiny_model(saved_as="classify")
    with pytest.raises(InputError, match="head of 5 classes, num_classes is 3"):
        build_layout(folder, make_config(folder, num_classes=3))


def test_classifier_without_its_language_head(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    folder = tiny_model(saved_as="classify", tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        build_layout(folder, make_config(folder, task="causal-lm"))


def test_importing_the_layout_is_light() -> None:
    heavy = "{'torch', 'numpy', 'transformers'}"
    code = f"import sys, trainer.model.layout; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
