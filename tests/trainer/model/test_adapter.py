"""What PEFT and transformers make of our files, on real tiny models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.trainer.tiny_run import tiny_progress
from trainer.checkpoint.store import CheckpointStore
from trainer.model.hf_export import iter_safetensors, model_config
from trainer.model.layout import build_layout
from trainer.optimizer.adamw import TrainState

# peft 0.21 asks transformers 5.23 for a property by its former name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

INPUT = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]])
MASK = (INPUT != 0).long()


def saved(model_dir: Path, folder: Path, config) -> tuple[Path, dict[str, np.ndarray]]:
    """Save random weights; return the checkpoint and the tensors that went into it."""
    layout = build_layout(model_dir, config)
    draw = np.random.default_rng(3)
    flat = (0.05 * draw.standard_normal(layout.size)).astype(np.float32)
    store = CheckpointStore(folder, layout, config, model_dir)
    path = store.save(TrainState.create(flat).take_snapshot(), tiny_progress(0))
    return path, {s.name: flat[s.start : s.stop].reshape(s.shape) for s in layout.iter_tensors()}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUT, attention_mask=MASK).logits


@pytest.mark.parametrize("task", ["classify", "causal-lm"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_peft_loads_the_adapter(task: str, family: str, tmp_path: Path, tiny_model, make_config):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    model_dir = tiny_model(family, pad_token_id=0)
    config = make_config(model_dir, task=task, **{"lora.lora_rank": 4, "lora.lora_alpha": 12})
    path, tensors = saved(model_dir, tmp_path, config)

    def base():
        torch.manual_seed(0)
        if task == "classify":
            return AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=5)
        return AutoModelForCausalLM.from_pretrained(model_dir)

    loaded = PeftModel.from_pretrained(base(), str(path))
    for name, value in loaded.state_dict().items():
        plain = name.replace(".default", "").replace(".modules_to_save", "")
        if "lora_" in name or "modules_to_save" in name:
            np.testing.assert_array_equal(value.numpy(), tensors.pop(plain))
    assert not tensors, "every tensor of the layout found its place"

    # The same weights set directly, with no file between.
    direct = get_peft_model(
        base(),
        LoraConfig(
            r=4,
            lora_alpha=12,
            target_modules=list(config.lora.linears),
            task_type="SEQ_CLS" if task == "classify" else "CAUSAL_LM",
        ),
    )
    adapter = {name: torch.from_numpy(value) for name, value in load_file_named(path).items()}
    for name, parameter in direct.named_parameters():
        plain = name.replace(".default", "").replace(".modules_to_save", "")
        if parameter.requires_grad:
            parameter.data.copy_(adapter[plain])
    assert torch.equal(logits(loaded), logits(direct))
    assert not torch.equal(logits(loaded), logits(base())), "the adapter does something"


def load_file_named(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "adapter_model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("task", ["classify", "causal-lm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_the_full_model(
    task: str, tied: bool, dtype: str, tmp_path: Path, tiny_model, make_config
):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    model_dir = tiny_model(tie_word_embeddings=tied, dtype=dtype, pad_token_id=0)
    config = make_config(model_dir, task=task, method="full")
    path, tensors = saved(model_dir, tmp_path, config)
    auto = AutoModelForSequenceClassification if task == "classify" else AutoModelForCausalLM
    loaded: Any = auto.from_pretrained(path, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    assert {value.dtype for value in state.values()} == {np.dtype(np.float32)}
    for name, value in tensors.items():
        np.testing.assert_array_equal(state[name], value)
    if task == "classify":
        assert model.config.num_labels == 5
        assert logits(model).shape == (2, 5)
    elif tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    else:
        assert "lm_head.weight" in tensors


@pytest.mark.parametrize("names", ["tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizer_files_come_along_with_a_full_model(
    tmp_path: Path, tiny_model, make_config, names: str
):
    source = tiny_model()
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in source.iterdir():
        (model_dir / file.name).write_bytes(file.read_bytes())
    (model_dir / names).write_text('{"pad_token": "<pad>"}')
    (model_dir / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 3, "content": "<pad>"}]})
    )
    (model_dir / "README.md").write_text("not for checkpoints")
    config = make_config(model_dir, method="full")
    path, _ = saved(model_dir, tmp_path / "checkpoints", config)
    assert (path / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    assert not (path / "README.md").exists()
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert names in manifest["files"]
    assert json.loads((path / "config.json").read_bytes())["pad_token_id"] == 3


def test_labels_of_the_base_stay_when_their_number_fits(tmp_path: Path, make_config):
    base = {"model_type": "qwen3", "id2label": {"0": "safe", "1": "unsafe"}, "torch_dtype": "x"}
    (tmp_path / "config.json").write_text(json.dumps(base))
    fits = model_config(make_config(tmp_path, num_classes=2), tmp_path)
    assert fits["label2id"] == {"safe": 0, "unsafe": 1}
    assert fits["dtype"] == "float32"
    assert "torch_dtype" not in fits
    other = model_config(make_config(tmp_path, num_classes=3), tmp_path)
    assert other["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}


def test_our_framing_is_what_the_library_reads(tmp_path: Path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "é.weight": np.array([-0.0, np.inf, 1e-45], dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "last": np.ones((5,), dtype=np.float32),
    }
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"".join(bytes(p) for p in iter_safetensors(tensors, {"format": "pt"})))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].shape == value.shape
        assert read[name].tobytes() == value.tobytes()
