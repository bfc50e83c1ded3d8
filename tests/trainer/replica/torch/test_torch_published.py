"""Our decoder and adapters against transformers and PEFT themselves."""

from __future__ import annotations

import json
import shutil
import warnings
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.covering import covering
from tests.families import COMPUTED_HERE
from tests.trainer.replica.driving import METHODS, TASKS, drawn_weights, gradient, relative, start
from trainer.config.run import RunConfig
from trainer.model.hf_export import adapter_config
from trainer.model.layout import GradientLayout, build_layout
from trainer.replica.torch import replica as torch_replica
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import flatten_parameters
from trainer.replica.torch.published_model import load_published

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CPU = torch.device("cpu")


def load_all_published(folder: Path, config: RunConfig, device: torch.device, *, resident: object):
    """Load as `load_published`: transformers' code has every layer in memory."""
    assert resident is None
    return load_published(folder, config, device)


def without(tree: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name != key}


@pytest.mark.parametrize(
    ("model_type", "method", "quantization", "dtype"),
    covering(
        [
            (model_type, *method, dtype)
            for model_type, method, dtype in product(
                COMPUTED_HERE, METHODS, ["float32", "bfloat16"]
            )
        ],
        together=2,
    ),
)
def test_outputs_and_gradients_are_those_of_the_published_model(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    method: str,
    quantization: str,
    dtype: str,
) -> None:
    """In bfloat16, where sums are rounded often, the same operations give the same bits."""
    folder = tiny.model(model_type, tie_word_embeddings=model_type != "llama")
    for task in TASKS:
        config = tiny.config(
            folder, task=task, method=method, model__dtype=dtype, model__quantization=quantization
        )
        assert isinstance(load_model(folder, config, CPU), Decoder)
        batch = tiny.batch(6, task)
        mine, found, _ = gradient(start(folder, config)[0], batch)
        with monkeypatch.context() as patch:
            patch.setattr(torch_replica, "load_model", load_all_published)
            theirs, expected, _ = gradient(start(folder, config)[0], batch)
        assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
        assert relative(mine, theirs) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 320},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("packed", [False, True])
def test_rarer_shapes_and_packed_rows_too(
    tiny: Tiny, packed: bool, settings: dict[str, Any]
) -> None:
    folder = tiny.model("llama", **settings)
    config = tiny.config(folder, task="causal-lm", method="full")
    ids = torch.arange(48).reshape(2, 24) * 7 % 300
    positions = torch.arange(24).expand(2, -1).clone()
    if packed:
        positions[0, 5:] -= 5
        positions[1, 20:] -= 20
    models: list[Any] = [load(folder, config, CPU) for load in (load_model, load_published)]
    found = [
        model.model(
            input_ids=ids, position_ids=positions if packed else None, use_cache=False
        ).last_hidden_state
        for model in models
    ]
    assert relative(found[0].detach().numpy(), found[1].detach().numpy()) < 1e-6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": without(LLAMA3, "rope_theta")},
            LLAMA3,
        ),
    ],
    ids=["theta", "linear", "llama3"],
)
@pytest.mark.parametrize("load", [load_model, load_all_published])
def test_the_config_json_of_transformers_4_gives_the_same_gradient(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    load: Any,
    old: dict[str, Any],
    new: dict[str, Any],
) -> None:
    monkeypatch.setattr(torch_replica, "load_model", load)
    folder, plain = tiny.model("llama", rope_parameters=new), tiny.model("llama")
    other = shutil.copytree(folder, tmp_path / "old")
    tree = json.loads((folder / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps(without(tree, "rope_parameters") | old))
    batch = tiny.batch(6, "causal-lm")

    def computed(model: Path) -> np.ndarray:
        return gradient(start(model, tiny.config(model, task="causal-lm"))[0], batch)[0]

    assert np.array_equal(computed(other), computed(folder))
    assert not np.array_equal(computed(other), computed(plain))


def test_what_the_decoder_does_not_compute_is_left_to_transformers(tiny: Tiny) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    }
    for settings in (
        {"rope_parameters": yarn},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"model_type": "mistral", "sliding_window": 16},
    ):
        folder = tiny.model(**settings)
        config = tiny.config(folder)
        assert not isinstance(load_model(folder, config, CPU), Decoder)
        replica, _ = start(folder, config)
        assert np.isfinite(gradient(replica, tiny.batch(3))[0]).all()


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"lora__target_modules": ("q_proj", "v_proj")},
        {"lora__use_rslora": True},
        {"lora__layers_to_transform": [1]},
    ],
    ids=["all linears", "queries and values", "rsLoRA", "one layer"],
)
def test_adapters_compute_what_peft_computes(
    tiny: Tiny, quantization: str, dtype: str, chosen: dict[str, Any]
) -> None:
    """PEFT gets the very files of a checkpoint: adapter_config.json and tensors by their names.

    In float32 the order of sums follows the processor's vectors: up to 1.4e-6 with AVX-512, 1.0e-6
    with AVX2. A factor that is wrong by 1e-4 would be 1e-4.
    """
    compare_with_peft(tiny, dtype, model__quantization=quantization, **chosen)


def test_dora_computes_what_peft_computes(tiny: Tiny) -> None:
    compare_with_peft(tiny, "float32", lora__use_dora=True, lora__use_rslora=True)


def test_an_embedding_that_trains_whole_computes_what_pefts_does(tiny: Tiny) -> None:
    """Beside NF4: an embedding is stored as it is."""
    chosen = {"lora__modules_to_save": ["embed_tokens"], "model__quantization": "nf4"}
    compare_with_peft(tiny, "float32", **chosen)


def compare_with_peft(tiny: Tiny, dtype: str, **chosen: Any) -> None:
    rounding = 5e-6 if dtype == "float32" else 1e-6
    folder = tiny.model()
    config = tiny.config(folder, model__dtype=dtype, lora__lora_alpha=24, **chosen)
    layout = build_layout(folder, config)
    weights = drawn_weights(folder, config)
    theirs = with_peft(folder, config, layout, weights)
    ours: Any = load_model(folder, config, CPU)
    flatten_parameters(ours, layout, CPU).copy_(torch.from_numpy(weights))
    ids = torch.from_numpy(tiny.batch(1)[0].input_ids.astype(np.int64))[None]
    outputs: list[torch.Tensor] = []
    for model in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        outputs.append(model.score(hidden.float())[:, -1])
        outputs[-1].square().sum().backward()
    assert relative(outputs[0].detach().numpy(), outputs[1].detach().numpy()) < rounding
    expected = {
        name.replace(".default", "").replace(".modules_to_save", ""): parameter
        for name, parameter in theirs.named_parameters()
    }
    trained = [(name, part) for name, part in ours.named_parameters() if part.requires_grad]
    assert len(trained) == len(list(layout.iter_tensors()))
    expected |= {name.removesuffix(".weight"): part for name, part in expected.items()}  # DoRA's
    for name, parameter in trained:
        assert relative(parameter.grad.numpy(), expected[name].grad.numpy()) < rounding, name


def test_a_quantised_model_of_transformers_keeps_nothing_of_its_file_in_memory(tiny: Tiny) -> None:
    folder = tiny.model(saved_as="bare")
    model = load_published(folder, tiny.config(folder, model__quantization="nf4"), CPU)
    assert model is not None
    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def with_peft(folder: Path, config: RunConfig, layout: GradientLayout, weights: np.ndarray) -> Any:
    """Return the published base with PEFT's own adapters, which hold the weights."""
    import peft

    base = published_base(folder, config)
    tree = adapter_config(config, folder)
    settings = {key: value for key, value in tree.items() if key != "peft_type"}
    tensors = {
        slot.name: torch.from_numpy(weights[slot.start : slot.stop].reshape(slot.shape).copy())
        for slot in layout.iter_tensors()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft 0.21 asks transformers 5.23 by a deprecated name
        wrapped: Any = peft.get_peft_model(
            base, peft.LoraConfig(**{**settings, "inference_mode": False})
        )
        wrapped.base_model.model.score.float()  # what trains is fp32
        peft.set_peft_model_state_dict(wrapped, tensors)
    return wrapped.train().base_model.model


def published_base(folder: Path, config: RunConfig) -> Any:
    """Return transformers' own classifier without adapters."""
    import transformers

    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, config.model.dtype),
        llm_int8_skip_modules=["score"],
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=getattr(torch, config.model.dtype),
        device_map={"": CPU},
        num_labels=config.num_classes,
        quantization_config=quantised if config.model.quantization == "nf4" else None,
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model
