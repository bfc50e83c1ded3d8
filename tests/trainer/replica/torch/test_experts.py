"""LoRA on experts and routers, as PEFT trains, writes and reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.trainer.replica.driving import drawn_weights, gradient, relative, start
from tests.trainer.replica.test_families import pytestmark, their_loss, theirs, write_trained
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.merge_lora import merge_adapter
from trainer.checkpoint.trained_model import load_trained, starting_weights
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.planning.memory import trained_parameters
from trainer.planning.model_config import read_shape
from trainer.planning.replica import make_training_setup
from trainer.replica.sampling import Sampling
from trainer.replica.torch.generator import load_generator
from trainer.replica.torch.linear import disable_adapters
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

__all__ = ["pytestmark"]

ROUTED = ["mixtral", "qwen3_moe"]
IDS = torch.arange(40)[None] * 7 % 300


def their_adapter(folder: Path, base: Path, **settings: Any) -> Any:
    """Save an adapter by PEFT, its tensors drawn at random; return PEFT's model with it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**lora))
    draw = torch.Generator().manual_seed(7)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    adapted.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base)})
    )
    return adapted.eval()


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("model_type", ROUTED)
def test_losses_of_some_steps_are_those_of_peft(
    tiny: Tiny, tmp_path: Path, model_type: str
) -> None:
    """From the same adapter, on the same samples, by AdamW of both."""
    folder = tiny.model(model_type)
    config = tiny.config(folder, task="causal-lm", optimizer__weight_decay=0.0)
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    model = theirs(write_trained(tmp_path / "out", folder, config, layout, weights), folder, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == layout.size
    shape, training = (
        read_shape(folder),
        make_training_setup(config, accelerator=False, recompute=False),
    )
    assert trained_parameters(shape, training) == layout.size
    rule = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, lr=1e-2, betas=(rule.beta1, rule.beta2), eps=rule.epsilon, weight_decay=0.0
    )
    replica, _ = start(folder, config)
    state, update = TrainState.create(weights.copy()), AdamW(rule, layout)
    batch = tiny.batch(6, "causal-lm")
    losses: list[tuple[float, float]] = []
    for _ in range(4):
        mine, found, _ = gradient(replica, batch)
        optimizer.zero_grad()
        loss = their_loss(model, batch)
        (loss / found.weight).backward()
        optimizer.step()
        losses.append((found.loss_sum, loss.item()))
        update.apply(state, mine, 1e-2, 1 / found.weight)
        replica.write_trainable(state.weights)
    assert losses[-1][0] < losses[0][0]
    for ours, wanted in losses:
        assert ours == pytest.approx(wanted, rel=1e-5)


TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-linear": ("mixtral", {"target_modules": "all-linear"}),
    "rslora": ("qwen3_moe", {"target_modules": "all-linear", "use_rslora": True}),
    "linears-of-version-4": ("qwen3_moe", {"target_modules": ["q_proj", "gate", "down_proj"]}),
    "one-parameter": (
        "mixtral",
        {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    ),
    "same-rank": (
        "qwen3_moe",
        {"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj"]},
    ),
    "alone": ("mixtral", {"target_modules": [], "target_parameters": ["gate.weight"]}),
    "transposed": (
        "gpt_oss",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
}


@pytest.mark.filterwarnings("ignore:target_modules=.* were set but no module was matched")
@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_of_peft_is_read_and_merged_as_peft_does(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    model_type, settings = TARGETS[name]
    # Square experts of gpt-oss: their shape does not tell which axis is which.
    folder = tiny.model(model_type, **({"intermediate_size": 64} if name == "transposed" else {}))
    expected = their_logits(their_adapter(tmp_path / "adapter", folder, **settings))
    trained = load_trained(tmp_path / "adapter")
    assert (trained.weights is None) == (name == "alone")  # no linear: it is merged
    replica_ids = [IDS[0].tolist()]
    if trained.weights is not None:
        generator = load_generator(folder, trained.config, trained.layout, trained.weights)
        (made,) = generator.generate(replica_ids, max_new_tokens=1, sampling=Sampling())
        assert made == [int(expected[0, -1].argmax())]
        config = trained.config.with_settings({"model.adapter": str(tmp_path / "adapter")})
        again = starting_weights(trained.layout, folder, config)
        assert np.array_equal(again, trained.weights)
    merged = merge_adapter(open_adapter(tmp_path / "adapter")[0], tmp_path / "merged")
    found = their_logits(transformers.AutoModelForCausalLM.from_pretrained(merged))
    assert relative(found.numpy(), expected.numpy()) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("mixtral", {"lora__layers_to_transform": [1]}),
        ("qwen3_moe", {"lora__target_modules": ["q_proj", "gate_proj", "up_proj"]}),
        ("qwen3_moe", {"lora__use_rslora": True}),
        ("mixtral", {"lora__target_parameters": ["experts.gate_up_proj"]}),
        (
            "gpt_oss",
            {
                "lora__target_modules": ["v_proj"],
                "lora__target_parameters": ["down_proj", "router.weight"],
            },
        ),
    ],
)
def test_an_adapter_of_some_parameters_loads_in_peft(
    tiny: Tiny, tmp_path: Path, model_type: str, lora: dict[str, Any]
) -> None:
    folder = tiny.model(model_type)
    config = tiny.config(folder, task="causal-lm", lora__lora_rank=2, **lora)
    layout, weights = build_layout(folder, config), drawn_weights(folder, config)
    out = write_trained(tmp_path / "out", folder, config, layout, weights)
    model = theirs(out, folder, config)
    batch = tiny.batch(3, "causal-lm")
    replica, _ = start(folder, config)
    assert replica.evaluate(batch).loss_sum == pytest.approx(
        their_loss(model, batch).item(), rel=1e-5
    )
    saved = {
        name.replace(".default", "") for name, p in model.named_parameters() if p.requires_grad
    }
    assert saved == {slot.name for slot in layout.iter_tensors()}
    trained = load_trained(out)
    assert trained.weights is not None
    model.disable_adapter_layers()
    with disable_adapters(replica._model):
        base = replica.evaluate(batch).loss_sum
    assert base == pytest.approx(their_loss(model, batch).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "lora", "reason"),
    [
        (
            "qwen3_moe",
            {"lora__target_modules": ["up_proj"]},
            "up_proj of experts is stacked with gate_proj; name both",
        ),
        (
            "mixtral",
            {"lora__target_parameters": ["experts.up"]},
            r"no parameter experts\.up of experts or routers \(it has mlp\.experts\.gate_up_proj",
        ),
        ("gemma2", {"lora__target_parameters": ["down_proj"]}, "it has no experts"),
        ("llama", {"lora__target_parameters": ["down_proj"]}, "it has no experts"),
    ],
)
def test_parameters_that_are_not_there(
    tiny: Tiny, model_type: str, lora: dict[str, Any], reason: str
) -> None:
    folder = tiny.model(model_type)
    with pytest.raises(InputError, match=reason):
        build_layout(folder, tiny.config(folder, **lora))


def test_a_damaged_adapter_of_experts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny.model("mixtral")
    their_adapter(tmp_path / "adapter", folder, target_modules="all-linear")
    file, path = tmp_path / "adapter/adapter_model.safetensors", tmp_path / "adapter"
    tensors, settings = load_file(file), (path / "adapter_config.json").read_text()
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    save_file({**tensors, name: tensors[name][:, :-4]}, file)
    with pytest.raises(InputError, match="do not fit 4 experts of"):
        load_trained(path)
    save_file({key: value for key, value in tensors.items() if ".experts." not in key}, file)
    with pytest.raises(InputError, match=r"contains no tensor for .* of target_parameters"):
        load_trained(path)
    save_file(tensors, file)
    for wrong, reason in (
        ({"target_parameters": "x"}, "must be a list of names"),
        ({"target_parameters": ["q_proj.weight"]}, "no parameter q_proj.weight of experts"),
        ({"base_model_name_or_path": str(tiny.model("llama"))}, "is read for experts alone"),
    ):
        (path / "adapter_config.json").write_text(json.dumps({**json.loads(settings), **wrong}))
        with pytest.raises(InputError, match=reason):
            load_trained(path)
