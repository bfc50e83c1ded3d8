"""The plan covers what torch keeps, without being far above it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.covering import covering
from tests.families import COMPUTED_HERE
from tests.families import FAMILIES as OWN
from tests.trainer.replica.driving import start
from tests.trainer.replica.kept_tensors import kept_bytes
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.model.layout import build_layout, read_headers
from trainer.planning.activations import of_head, of_layer, of_layer_input
from trainer.planning.memory import trained_parameters
from trainer.planning.model_config import read_shape
from trainer.planning.replica import (
    BUSY_TOKENS,
    CPU_TOKENS,
    USABLE,
    Recomputation,
    busy_tokens,
    choose_recomputation,
    make_training_setup,
    most_tokens,
    plan_memory,
)
from trainer.planning.strategy import Strategy
from trainer.replica.microbatch import MicroBatchLimit, split_by_length
from trainer.replica.torch import replica as torch_replica
from trainer.replica.torch.replica import TorchReplica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.tiny import Tiny
    from trainer.config.run import RunConfig
    from trainer.planning.replica import MemoryPlan


OTHERS = [name for name in OWN if name not in COMPUTED_HERE]


def plan_of(folder: Path, config: RunConfig, **settings: bool) -> MemoryPlan:
    return plan_memory(
        read_shape(folder),
        read_headers(folder),
        build_layout(folder, config),
        config,
        **{"accelerator": False, "recompute": False, **settings},
    )


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_of_one_process_has_one_state(tiny: Tiny, method: str) -> None:
    """Two moments beside weights and gradient; a worker has an averaged gradient too."""
    folder = tiny.model()
    config = tiny.config(folder, method=method)
    worker, alone = plan_of(folder, config), plan_of(folder, config, coordinates=True)
    assert worker.state == 3 * worker.trainable
    assert alone.state == 2 * worker.trainable
    assert replace(alone, state=worker.state) == worker
    on_card = plan_of(folder, config, accelerator=True, coordinates=True)
    assert on_card.state == 0


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ({"exchange__codec": "bf16"}, 10),
        ({"exchange__codec": "int8"}, 9 + 4 / 256),
        ({"exchange__codec": "auto"}, 10),
        ({"exchange__schedule": "rounds", "exchange__inner_steps": 4}, 28),
    ],
)
def test_one_process_with_a_codec_or_rounds_holds_more(
    tiny: Tiny, settings: dict[str, Any], state: float
) -> None:
    """Averages that stay encoded, or two states."""
    folder = tiny.model()
    alone = plan_of(folder, tiny.config(folder, **settings), coordinates=True)
    assert alone.state == int(state * alone.trainable / 4)


@pytest.mark.parametrize("accelerator", [False, True])
def test_an_evaluation_has_neither_gradients_nor_an_optimizer(
    tiny: Tiny, accelerator: bool
) -> None:
    folder = tiny.model()
    config = tiny.config(folder, method="full")
    worker = plan_of(folder, config, accelerator=accelerator)
    found = plan_of(folder, config, accelerator=accelerator, evaluates=True)
    assert worker.gradients == worker.trainable
    nothing = {"gradients": 0, "state": 0}
    forward = {name: getattr(found, name) for name in ("per_token", "per_waiting_token")}
    assert found == replace(worker, **nothing, **forward)
    assert found.per_token < worker.per_token


def test_an_evaluation_keeps_one_layer_however_deep_the_model_is(tiny: Tiny) -> None:
    shallow, deep = (tiny.model(num_hidden_layers=layers) for layers in (2, 12))
    for recompute in (False, True):
        plans = [
            plan_of(folder, tiny.config(folder), recompute=recompute, evaluates=True)
            for folder in (shallow, deep)
        ]
        assert plans[0].per_token == plans[1].per_token
        assert plans[0].per_waiting_token == plans[1].per_waiting_token


def peak_per_token(replica: TorchReplica, length: int) -> float:
    """Return the most bytes that are in use at a time for each token of a further sample."""

    def peak(samples: int) -> int:
        ids = np.arange(length, dtype=np.int32)
        batch = [Encoded(ids, np.where(ids < length - 1, IGNORED, ids))] * samples
        replica.evaluate(batch)  # what is made at the first use stays
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            replica.evaluate(batch)
        profiler: Any = found.profiler
        events = profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        return max(itertools.accumulate(size for _, size in changes))

    return (peak(4) - peak(2)) / (2 * length)


@pytest.mark.parametrize(
    ("model_type", "method", "dtype"),
    covering(
        product(
            ["qwen3", "mixtral", "gpt_oss", "gpt2", "qwen3_5_text"],
            ["lora", "full"],
            ["float32", "bfloat16"],
        )
    ),
)
def test_the_tensors_of_an_evaluation_are_counted(
    tiny: Tiny, model_type: str, method: str, dtype: str
) -> None:
    """From above: a layer's tensors are never there together."""
    length = 64
    folder = tiny.model(model_type, hidden_size=256, intermediate_size=768)
    settings = {"method": method, "model__dtype": dtype, "data__max_seq_len": length}
    config = tiny.config(folder, task="causal-lm", training__micro_batch_size=4, **settings)
    layout = build_layout(folder, config)
    replica = TorchReplica(folder, config, layout, threads=1, evaluates=True)
    if method == "lora":
        replica.write_trainable(np.zeros(layout.size, np.float32))
    planned = plan_of(folder, config, recompute=True, evaluates=True).per_token
    assert 0.3 * planned < peak_per_token(replica, length) <= planned


def test_a_micro_batch_of_several_rows_has_the_logits_of_all(tiny: Tiny) -> None:
    folder = tiny.model()
    settings: dict[str, Any] = {"task": "causal-lm", "num_classes": None}
    one, four = (
        plan_of(folder, tiny.config(folder, training__micro_batch_size=rows, **settings))
        for rows in (1, 4)
    )
    logits = 4 * one.sample_tokens * read_shape(folder).vocab
    assert four.workspace - one.workspace == 3 * logits
    assert replace(four, workspace=one.workspace) == one


def saved_per_token(replica: TorchReplica, length: int, *, classes: bool = True) -> float:
    """Return the bytes that autograd saves for each token of a further sample."""

    def saved(samples: int) -> int:
        ids = np.arange(length, dtype=np.int32)
        batch = [Encoded(ids, 0 if classes else np.where(ids < length - 1, IGNORED, ids))] * samples
        return kept_bytes(lambda: replica.forward_backward(batch, lambda *_: None))

    # Weights and their copies are in both and cancel out.
    return (saved(4) - saved(2)) / (2 * length)


PRECISIONS = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "fp16": ("float32", "fp16"),
}
"""dtype of the model, precision of the training."""


@pytest.mark.parametrize(
    ("model_type", "method", "precision", "recompute"),
    covering(product(["qwen3", "qwen2", "llama"], ["lora", "full"], PRECISIONS, [False, True])),
)
def test_activations_are_counted(
    tiny: Tiny, model_type: str, method: str, precision: str, recompute: bool
) -> None:
    # Wide enough that the terms of the estimate carry their real weight.
    folder = tiny.model(model_type, hidden_size=256, intermediate_size=768)
    config = tiny.config(
        folder,
        method=method,
        model__dtype=PRECISIONS[precision][0],
        training__precision=PRECISIONS[precision][1],
        training__gradient_checkpointing=recompute,
    )
    replica, _ = start(folder, config)
    measured = saved_per_token(replica, length=64)
    training = make_training_setup(config, accelerator=False, recompute=recompute)
    shape, one = read_shape(folder), Strategy()
    layer = of_layer_input if recompute else of_layer
    planned = 2 * layer(shape, training, one).value + of_head(shape, training).value
    # The first norm's input does not count where the embedding is frozen.
    unused = 0 if recompute or method == "full" else 4 * shape.hidden
    small = 24  # means of norms, positions: a few numbers for each token
    assert planned - unused <= measured <= 1.005 * (planned - unused) + small


@pytest.mark.parametrize(
    ("model_type", "method", "dtype", "length"),
    covering(product(OTHERS, ["lora", "full"], ["float32", "bfloat16"], [64, 192])),
)
def test_activations_of_layers_of_transformers_are_counted(
    tiny: Tiny, model_type: str, method: str, dtype: str, length: int
) -> None:
    """Queries twice as many as keys, heads of 64, and scores that weigh."""
    states = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    experts = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192}
    wide = {
        "gpt2": {"n_inner": 768},
        "qwen3_moe": {"moe_intermediate_size": 192},
        "qwen3_5_text": states,
        "qwen3_5_moe_text": {**states, **experts},
        "qwen3_next": {**states, **experts},
    }
    head = {} if OWN[model_type].get("head_dim", 64) is None else {"head_dim": 64}
    sizes = {"hidden_size": 256, "intermediate_size": 768, **head, **wide.get(model_type, {})}
    folder = tiny.model(model_type, **sizes)
    config = tiny.config(
        folder, task="causal-lm", method=method, model__dtype=dtype, data__max_seq_len=length
    )
    replica, _ = start(folder, config)
    measured = saved_per_token(replica, length, classes=False)
    training = make_training_setup(config, accelerator=False, recompute=False)
    shape = read_shape(folder)
    planned = 2 * of_layer(shape, training, Strategy()).value + of_head(shape, training).value
    assert 0.85 * planned < measured < 1.06 * planned


def test_nf4_is_of_experts_too(tiny: Tiny) -> None:
    folder = tiny.model("mixtral", hidden_size=256, intermediate_size=768)
    config = tiny.config(folder, model__quantization="nf4")
    model = start(folder, config)[0]._model
    held = sum(part.nbytes for part in model.parameters() if not part.requires_grad)
    modules = [module for module in model.modules() if hasattr(module, "stored")]
    sources = {each._source for module in modules for each in module.stored.values()}
    assert len(sources) == read_shape(folder).layers
    held += sum(source._memory.nbytes for source in sources)
    states = [m.weight.quant_state for m in model.modules() if hasattr(m, "quant_state")]
    held += sum(state.absmax.nbytes for state in states if state is not None)
    held -= sum(part.nbytes for name, part in model.named_parameters() if "score" in name)
    assert plan_of(folder, config).frozen == pytest.approx(held, rel=0.02)


def test_parts(tiny: Tiny) -> None:
    folder = tiny.model()
    plain = plan_of(folder, tiny.config(folder))
    layout = build_layout(folder, tiny.config(folder))
    stored = sum(header.end - header.begin for header in read_headers(folder).values())
    assert plain.frozen == stored
    assert plain.trainable == plain.gradients == 4 * layout.size
    config = tiny.config(folder, lora__freeze_a=True)
    half, b = plan_of(folder, config), build_layout(folder, config).size
    assert half.trainable == half.gradients == 4 * b
    assert half.frozen == stored + 4 * (layout.size - b)
    config = tiny.config(folder, lora__layers_to_transform=[1], lora__freeze_a=True)
    assert plan_of(folder, config).trainable == 4 * build_layout(folder, config).size
    assert plan_of(folder, config).frozen - stored == (half.frozen - stored) / 2
    quantised = plan_of(folder, tiny.config(folder, model__quantization="nf4"))
    assert quantised.frozen < plain.frozen / 2
    full = plan_of(folder, tiny.config(folder, method="full"))
    assert (full.frozen, full.state) == (0, 3 * full.trainable)
    card = plan_of(folder, tiny.config(folder, method="full"), accelerator=True, recompute=True)
    assert card.state == 0
    assert card.per_token < full.per_token
    heads = [
        plan_of(folder, tiny.config(folder, task="causal-lm", method=method)).workspace
        for method in ("full", "lora")
    ]
    assert heads[0] - heads[1] == 4 * 300 * 64  # the gradient of the output layer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_tables_that_train_whole(tiny: Tiny, names: list[str], tied: bool) -> None:
    folder = tiny.model(tie_word_embeddings=tied)
    chosen: dict[str, Any] = {"task": "causal-lm", "training__micro_batch_size": 1}
    plain = plan_of(folder, tiny.config(folder, **chosen))
    config = tiny.config(folder, **chosen, lora__modules_to_save=names)
    plan, table = plan_of(folder, config), 4 * 300 * 64
    assert plan.trainable == 4 * build_layout(folder, config).size
    assert plan.trainable - plain.trainable == len(names) * table
    assert plan.gradients - plain.gradients == len(names) * table
    assert plan.state - plain.state == len(names) * 3 * table
    assert plan.workspace - plain.workspace == ("lm_head" in names) * table
    model = start(folder, config)[0]._model
    assert plan.frozen == sum(part.nbytes for part in model.parameters() if not part.requires_grad)
    training = make_training_setup(config, accelerator=False, recompute=False)
    assert trained_parameters(read_shape(folder), training) == build_layout(folder, config).size


def test_split_keeps_every_sample_once_within_the_limit() -> None:
    lengths = [5, 40, 3, 40, 0, 17, 90, 8]
    groups = split_by_length(lengths, MicroBatchLimit(3, 100))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[index] for index in group)
        assert len(group) == 1 or (len(group) <= 3 and width * len(group) <= 100)
    assert groups[0] == [6]
    assert split_by_length([], MicroBatchLimit(1, 1)) == []


def test_memory_decides_on_recomputation(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` recomputes on either side of the same line that refuses a plan."""
    folder = tiny.model("qwen3")
    config = tiny.config(folder, method="full", training__micro_batch_size="auto")
    plan = plan_of(folder, config, accelerator=True, moments=True)
    size = build_layout(folder, config).size
    assert plan.state == 2 * 4 * size
    assert plan_of(folder, config, accelerator=True).state == 0
    assert busy_tokens(config, accelerator=True) == BUSY_TOKENS
    assert most_tokens(config) == CPU_TOKENS
    four = tiny.config(folder, training__micro_batch_size=4)
    assert most_tokens(four) == 4 * four.data.max_seq_len
    enough = plan.fixed + BUSY_TOKENS * plan.per_token

    def chosen(config: RunConfig, free: float) -> Recomputation:
        return choose_recomputation(config, lambda: enough, int(free), accelerator=True)

    kept, again = chosen(config, enough / USABLE + 10), chosen(config, enough / USABLE - 10)
    assert not kept.on
    assert again.on
    assert again.reason.startswith("gradient checkpointing on: with all activations of 4,096 token")
    for word in ("on", "off"):
        fixed = tiny.config(folder, training__gradient_checkpointing=word)
        assert chosen(fixed, 1) == Recomputation(word == "on", "")
    with caplog.at_level(logging.INFO):
        TorchReplica(folder, config, build_layout(folder, config), threads=1)
    assert any("cpu: gradient checkpointing off: with all" in line for line in caplog.messages)


def test_a_cpu_with_little_memory_recomputes_before_it_refuses(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.model("qwen3", num_hidden_layers=8)
    settings = {"data__max_seq_len": 256, "training__micro_batch_size": "auto"}
    config = tiny.config(folder, **settings)
    kept, again = (plan_of(folder, config, recompute=word).least for word in (False, True))
    free = int((kept + again) / 2 / USABLE)
    monkeypatch.setattr(torch_replica, "available_bytes", lambda _device: free)
    TorchReplica(folder, config, build_layout(folder, config), threads=1)
    fixed = tiny.config(folder, **settings, training__gradient_checkpointing="off")
    with pytest.raises(InputError, match=r"free; use .* or training.gradient_checkpointing on"):
        TorchReplica(folder, fixed, build_layout(folder, fixed), threads=1)


def test_memory_follows_the_precision(tiny: Tiny) -> None:
    """Also of a processor, whose memory holds the exchange's vectors in any format."""
    folder = tiny.model("qwen3")
    wide, narrow = (
        plan_of(folder, tiny.config(folder, training__precision=word)) for word in ("fp32", "fp16")
    )
    assert narrow.per_token < wide.per_token
    assert narrow.state == wide.state == 3 * wide.trainable
    # Backward needs the frozen linears in fp16; recomputation, those of one layer.
    shape = read_shape(folder)
    copies = 2 * shape.linear_parameters()
    config = tiny.config(folder, training__precision="fp16")
    once = plan_of(folder, config, recompute=True)
    assert narrow.workspace - once.workspace == copies * (1 - 1 / shape.layers)
    on_card = plan_of(folder, tiny.config(folder, training__precision="fp32"), accelerator=True)
    assert on_card.per_token == wide.per_token


def test_frozen_linears_are_kept_in_the_format_of_products(tiny: Tiny) -> None:
    """Counts what autograd saves of a model of fp32 that computes in bf16."""
    folder = tiny.model("qwen3")
    config = tiny.config(folder, training__precision="bf16", training__gradient_checkpointing="off")
    shape = read_shape(folder)
    replica, _ = start(folder, config)
    saved: dict[int, torch.Tensor] = {}
    linears = {tuple(sorted(sides)) for sides in shape.layer_matrices().values()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tuple(sorted(tensor.shape)) in linears:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        replica.forward_backward([Encoded(np.arange(9, dtype=np.int32), 0)], lambda *_: None)
    found = sum(tensor.numel() for tensor in saved.values())
    # The first layer's attention has no gradient to its input, a frozen embedding's.
    sizes = {name: rows * columns for name, (rows, columns) in shape.layer_matrices().items()}
    first = sum(sizes[name] for name in ("q_proj", "k_proj", "v_proj"))
    assert found == shape.linear_parameters() - first
