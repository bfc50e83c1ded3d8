"""Models of transformers with weights in NF4, or read at each use."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.covering import covering
from tests.trainer.replica.driving import gradient, relative
from tests.trainer.replica.torch.test_streaming import FORMATS, feed_of, train
from tests.trainer.replica.unlisted_models import write_tiny
from trainer.model.families import FAMILIES
from trainer.replica.torch import experts
from trainer.replica.torch.streaming import StreamedEmbedding
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny

functional = pytest.importorskip("bitsandbytes.functional")

_SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_hidden_layers": 3},
    "mixtral": {"num_hidden_layers": 3},
    "gpt_oss": {"num_hidden_layers": 2},
    "qwen3_next": {**_SHARED, "num_hidden_layers": 2},
    "qwen3_5_moe_text": {**_SHARED, "num_hidden_layers": 2},
}
"""Whose matrices NF4 divides."""
DENSE: dict[str, dict[str, Any]] = {
    **{family: {"num_hidden_layers": 2} for family in ("gemma2", "gemma3_text", "lfm2", "cohere2")},
    **{family: {"num_hidden_layers": 3} for family in ("phi3", "granite", "gpt2")},
    "mistral": {"num_hidden_layers": 3, "sliding_window": 16},
}
TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"lora__target_modules": ["q_proj", "v_proj"]},
    "experts": {
        "lora__target_modules": ["q_proj"],
        "lora__target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}
WAYS = covering(
    (family, form, targets, resident, recompute)
    for family in SIZES
    for form in FORMATS
    for targets in TARGETS
    for resident in (0, 1)
    for recompute in (True, False)
    # Experts with adapters are otherwise one product with W + B A, which has other bits.
    if targets == "attention" or "nf4" in form
)
DENSE_WAYS = covering(
    (family, task, form, resident)
    for family in DENSE
    for task in ("classify", "causal-lm", "dpo")
    for form in (FORMATS if task == "causal-lm" else ("fp32",))
    for resident in (0, 1)
    # Blocks of NF4 are those of rows, which GPT-2 stores as columns.
    if (family != "gpt2" or "nf4" not in form)
    and (task != "classify" or FAMILIES[family].classifier)
)
NF4 = {"task": "causal-lm", "model__quantization": "nf4"}


def make_folder(tiny: Tiny, family: str, dtype: str = "float32", **sizes: Any) -> Path:
    return tiny.model(family, dtype=dtype, **{**SIZES[family], **sizes})


def check_streamed(
    tiny: Tiny, folder: Path, settings: dict[str, Any], batch: Any, resident: int, layers: int
) -> None:
    """Check that a step with so many resident layers has the bits of one with all."""
    whole = train(*tiny.start(folder, **settings, model__resident="all"), batch)
    replica, weights = tiny.start(folder, **settings, model__resident=resident)
    assert train(replica, weights, batch) == whole
    assert replica.residents.startswith(f"{resident} of {layers} layers resident")
    assert len(feed_of(replica)._weights.layers) == layers - resident


@pytest.mark.parametrize(("family", "form", "targets", "resident", "recompute"), WAYS)
def test_losses_gradients_and_weights_are_those_of_the_resident_run(
    tiny: Tiny, family: str, form: str, targets: str, resident: int, recompute: bool
) -> None:
    dtype, stored = FORMATS[form]
    folder = make_folder(tiny, family, dtype)
    settings: dict[str, Any] = {"task": "causal-lm", **TARGETS[targets], **stored}
    settings |= {"training__gradient_checkpointing": recompute, "lora__lora_rank": 4}
    batch = tiny.batch(5, "causal-lm")
    check_streamed(tiny, folder, settings, batch, resident, SIZES[family]["num_hidden_layers"])


@pytest.mark.parametrize(("family", "task", "form", "resident"), DENSE_WAYS)
def test_dense_models_that_transformers_computes_are_read(
    tiny: Tiny, family: str, task: str, form: str, resident: int
) -> None:
    dtype, settings = FORMATS[form]
    folder = tiny.model(family, dtype=dtype, **DENSE[family])
    settings = {**settings, "task": task, "lora__lora_rank": 4, "training__micro_batch_size": 2}
    settings |= {"training__gradient_checkpointing": resident == 0}
    batch = tiny.batch(5, task)
    check_streamed(tiny, folder, settings, batch, resident, DENSE[family]["num_hidden_layers"])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_are_read_learn_as_resident_ones_do(tiny: Tiny, family: str) -> None:
    folder = make_folder(tiny, family)
    settings: dict[str, Any] = {"task": "causal-lm", **TARGETS["experts"]}
    batch = tiny.batch(5, "causal-lm")
    whole, streamed = (
        gradient(tiny.start(folder, **settings, model__resident=resident)[0], batch)[0]
        for resident in ("all", 0)
    )
    assert relative(streamed, whole) < 1e-5


def write_dequantized(folder: Path, made: Path) -> dict[str, torch.Tensor]:
    """Write a model out of bitsandbytes' NF4 of each linear and of each expert's matrix."""
    shutil.copytree(folder, made)
    path = made / "model.safetensors"
    tensors, packed = load_file(path), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        is_router = re.search(r"\.(gate|router)\.weight$", name)
        if ".layers." not in name or tensor.dim() < 2 or is_router or "bias" in name:
            continue
        each = tensor if tensor.dim() == 3 else tensor[None]
        results = [functional.quantize_4bit(one, quant_type="nf4") for one in each]
        packed[name] = torch.cat([codes.flatten() for codes, _ in results])
        out = [functional.dequantize_4bit(codes, state) for codes, state in results]
        tensors[name] = torch.stack(out).view(tensor.shape)
    save_file(tensors, path, {"format": "pt"})
    return packed


@pytest.mark.parametrize("targets", [*TARGETS, "default"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_nf4_computes_what_transformers_and_peft_do_with_the_same_values(
    tiny: Tiny, tmp_path: Path, family: str, targets: str
) -> None:
    folder, batch = make_folder(tiny, family), tiny.batch(5, "causal-lm")
    packed = write_dequantized(folder, tmp_path / "plain")
    settings = TARGETS.get(targets, {})
    if family == "gpt_oss" and targets == "default":
        settings = TARGETS["attention"]
    replica, weights = tiny.start(folder, **NF4, **settings)
    plain, _ = tiny.start(tmp_path / "plain", task="causal-lm", **settings)
    plain.write_trainable(weights.copy())
    found, wanted = gradient(replica, batch), gradient(plain, batch)
    assert found[1].loss_sum == pytest.approx(wanted[1].loss_sum, rel=1e-5)
    assert relative(found[0], wanted[0]) < 1e-5
    for module in replica._model.modules():
        for stored in getattr(module, "stored", {}).values():
            for name in {part for parts in stored._tensors for part in parts}:
                codes = stored._source.read(stored._layer, name, trains=False)
                # A class has names of its own.
                own = name.replace("mlp.experts", "block_sparse_moe.experts")
                assert torch.equal(codes, packed.pop(name if name in packed else own))
    assert not any("experts" in name for name in packed)


def test_only_the_experts_of_a_pass_are_unpacked(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tiny, "qwen3_moe", num_experts=16)
    replica, _ = tiny.start(folder, **NF4, **TARGETS["attention"])
    unpacked: list[Any] = []
    unpack = experts.unpack_nf4

    def count(*args: Any) -> torch.Tensor:
        unpacked.append(args)
        return unpack(*args)

    monkeypatch.setattr(experts, "unpack_nf4", count)
    replica.answer([[5]], 1, frozenset())
    assert len(unpacked) == 3 * 2 * 2, "of each layer two experts, with two matrices each"


def test_a_start_quantises_nothing_that_is_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    folder = make_folder(tiny, "qwen3_moe")
    for resident in ("all", 0, 2):
        tiny.start(folder, **NF4, model__resident=resident)
    assert len(list((tmp_path / "cache").glob("*/nf4.safetensors"))) == 1
    count = 3 * (4 + 4 * 3)
    assert sum(f"quantising {count} tensors" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_answers_are_those_of_the_resident_model(tiny: Tiny, quantization: str) -> None:
    folder = make_folder(tiny, "qwen3_moe")
    settings: dict[str, Any] = {**NF4, **TARGETS["attention"], "model__quantization": quantization}
    found = [
        tiny.start(folder, **settings, model__resident=each)[0].answer(
            [[5, 6, 7], [8]], 6, frozenset()
        )
        for each in ("all", 0)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_has_what_stays(tiny: Tiny, tied: bool, quantization: str) -> None:
    folder = make_folder(tiny, "qwen3_moe", tie_word_embeddings=tied)
    settings: dict[str, Any] = {**NF4, **TARGETS["attention"], "model__quantization": quantization}
    replica, _ = tiny.start(folder, **settings, model__resident=0)
    model: Any = replica._model
    assert isinstance(model.model.embed_tokens, StreamedEmbedding) != tied
    kept = [each for each in model.parameters() if not each.requires_grad]
    assert replica._plan.frozen == sum(each.nbytes for each in kept)
    assert not any(each.is_meta for each in model.parameters())


@pytest.mark.parametrize("family", ["apertus", "deepseek_v2", "jamba", "mamba", "phi"])
def test_the_plan_counts_layers_of_other_sizes_than_the_config_tells(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    """MLPs of two matrices, factors of projections, states, unlike layers."""
    folder = write_tiny(tmp_path / "model", family)
    for resident in (0, 1):
        own: Any = {"task": "causal-lm", "lora__lora_rank": 4, "model__resident": resident}
        replica, _ = tiny.start(folder, **own)
        kept = [each for each in replica._model.parameters() if not each.requires_grad]
        assert replica._plan.frozen == pytest.approx(sum(each.nbytes for each in kept), rel=1e-3)


@pytest.mark.parametrize(
    ("family", "target", "settings"),
    [
        ("olmoe", "o_proj", NF4),
        ("afmoe", "o_proj", {"task": "causal-lm"}),
        *((family, "o_proj", NF4) for family in ("granitemoe", "phimoe")),
        *((family, "o_proj", {"task": "causal-lm"}) for family in ("ernie4_5_moe", "axk1")),
        ("gpt_neox", "dense", NF4),
        ("mamba", "dt_proj", {"task": "causal-lm"}),
    ],
)
def test_an_unlisted_family_is_read_too(
    tiny: Tiny, tmp_path: Path, family: str, target: str, settings: dict[str, Any]
) -> None:
    """A class may draw a router's weights itself, or use a linear's weight past its product."""
    folder, batch = write_tiny(tmp_path / "model", family), tiny.batch(3, "causal-lm")
    own = {**settings, "lora__target_modules": [target], "lora__lora_rank": 4}
    found = [train(*tiny.start(folder, **own, model__resident=each), batch) for each in ("all", 0)]
    assert found[0] == found[1]


def test_layers_that_are_in_neither_linears_nor_experts_are_refused(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Only LongCat's attention could be read, the smaller part of its layers."""
    folder = write_tiny(tmp_path / "model", "longcat_flash")
    with pytest.raises(InputError, match=r"gate_up_proj is of neither linears nor experts"):
        tiny.start(folder, task="causal-lm", model__resident=0)


def test_rows_that_no_block_ends_are_refused(tiny: Tiny) -> None:
    folder = make_folder(tiny, "qwen3_moe", moe_intermediate_size=32)
    with pytest.raises(
        InputError, match=r"down_proj is 32 wide; nf4 of experts needs a multiple of 64"
    ):
        tiny.start(folder, **NF4)
