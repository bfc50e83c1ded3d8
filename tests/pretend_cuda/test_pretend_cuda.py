"""The trainer on a CUDA device: it computes what the CPU does, and the host waits rarely.

The device is pretended, or real where there is one.
A case with more waits than here has a new `.item()` in its way, or what is like one; with fewer, it
gets the lower number.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.distributed_ranks import RankError, Ranks
from tests.pretend_cuda.library import TORCH, build
from tests.trainer.replica.torch.parallel.models import write_drawn_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import TinyModel

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),  # the first waits for a compiler and imports, on a busy machine too
]

HERE = "tests.pretend_cuda.cases"
EXACT, ROUNDED = 1e-4, 3e-2
"""How far apart results may be: in fp32 two updates by AdamW magnify what was rounded in small
gradients, to 1e-5, and autocast rounds other operations on a device than on the CPU."""

PRECISION = "training.precision"
FP32, BF16, FP16 = ({PRECISION: name} for name in ("fp32", "bf16", "fp16"))
FULL = {"method": "full"}
NF4 = {"model.quantization": "nf4"}
CLASSIFY = {"task": "classify"}
DPO = {"task": "dpo"}
RECOMPUTED = {"training.gradient_checkpointing": "on"}
TAUGHT = FP32 | FULL | {"distillation.alpha": 0.7}

WORKER = {"TorchReplica._make_results": 1, "_PinnedCopies.wait": 1}
"""For the loss, and for the last block of the gradient, which no more work hides."""
SCRIPT = {
    "ScriptReplica.forward_backward": 1,
    "_PinnedCopies.wait": 1,
    "ScriptReplica.evaluate": 2,
    "check_figures": 2,
}
"""As a worker; and for the loss and the figure of each of a validation's two micro-batches."""
STUDENT = {"TorchReplica._make_results": 1, "StudentOptimizer.apply": 1}
"""For the loss, and for the gradient's norm, which may end the run."""
RANK = {
    "ParallelReplica._agree_on_groups": 1,
    "ParallelReplica.accumulate": 1,
    "ParallelAdamW._global_norm": 1,
}
"""For what the mean divides by, for the loss and for the norm."""
STAGE = RANK | {"Pipeline._run_schedule": 2}
"""torch's stages agree on their connections again for each new shape of a micro-batch."""
SCALE = {"LossScale.unscale_gradients": 1}
"""For whether fp16 overflowed."""

CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, int]]] = {
    "lora": ("worker", FP32, WORKER),
    "qlora": ("worker", FP32 | NF4, WORKER),
    "full": ("worker", FP32 | FULL, WORKER),
    "classifier": ("worker", FP32 | CLASSIFY, WORKER),
    "dpo": ("worker", FP32 | DPO, WORKER),
    "packed": ("worker", FP32 | {"training.pack": True}, WORKER),
    "recomputed": ("worker", FP32 | RECOMPUTED, WORKER),
    "streamed": ("worker", FP32 | RECOMPUTED | {"model.resident": 0}, WORKER),
    "bf16": ("worker", BF16, WORKER),
    "fp16": ("worker", FP16, WORKER | SCALE),
    "script": ("script", {"training__precision": "fp32"}, SCRIPT),
    "scores": ("scores", FP32, {"TorchReplica._score_batch": 1}),
    "scores-classifier": ("scores", FP32 | CLASSIFY, {"TorchReplica._score_batch": 2}),
    "scores-dpo": ("scores", FP32 | DPO, {"TorchReplica._score_batch": 2}),
    "student": ("student", TAUGHT, STUDENT),
    "student-resumed": ("resumed", TAUGHT, STUDENT),
    "student-bf16": ("student", TAUGHT | BF16, STUDENT),
    "generation": ("generation", FP32, {"TorchGenerator._generate_batch": 5}),
    "teacher-topk": ("teacher", {"kind": "topk", "top_k": 20}, {"Scorer.score_rows": 7}),
    "teacher-sampled": ("teacher", {"kind": "sampled"}, {"Scorer.score_rows": 7}),
    "ddp": ("rank", FP32, RANK),
    "fsdp": ("rank", FP32 | {"parallel.data": "fsdp"}, RANK),
    "fsdp-full-fp16": ("rank", FP16 | FULL | {"parallel.data": "fsdp"}, RANK | SCALE),
    "tensor": ("rank", FP32 | {"parallel.tensor": 2}, RANK),
    "tensor-qlora": ("rank", FP32 | NF4 | {"parallel.tensor": 2}, RANK),
    "sequence": ("rank", FP32 | {"parallel.tensor": 2, "parallel.sequence": True}, RANK),
    "pipeline": ("rank", FP32 | {"parallel.pipeline.stages": 2}, STAGE),
    "pipeline-classifier": ("rank", FP32 | CLASSIFY | {"parallel.pipeline.stages": 2}, STAGE),
}
"""What runs, with which settings, and how often the host waits in a step, by who makes it wait."""


STREAMED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "lora": ("worker", FP32),
    "recomputed": ("worker", BF16 | {"model.dtype": "bfloat16"} | RECOMPUTED),
    "qlora": ("worker", BF16 | NF4),
    "qlora-recomputed": ("worker", FP32 | NF4 | RECOMPUTED),
    "qlora-packed": ("worker", FP32 | NF4 | RECOMPUTED | {"training.pack": True}),
    "classifier": ("worker", FP32 | CLASSIFY),
    "classifier-recomputed": ("worker", FP32 | CLASSIFY | NF4 | RECOMPUTED),
    "dpo": ("worker", FP32 | DPO | NF4),
    "dpo-recomputed": ("worker", FP32 | DPO | RECOMPUTED),
    "frozen-a": ("worker", FP32 | {"lora.freeze_a": True}),
    "frozen-a-recomputed": ("worker", BF16 | {"lora.freeze_a": True} | RECOMPUTED),
    "student": ("student", FP32 | {"distillation.alpha": 0.7} | NF4),
    "student-recomputed": ("student", FP32 | {"distillation.alpha": 0.7} | RECOMPUTED),
    "scores": ("scores", FP32),
    "scores-full": ("scores", BF16 | FULL),
    "scores-classifier-qlora": ("scores", FP32 | CLASSIFY | NF4),
    "generation": ("generation", FP32),
    "generation-full": ("generation", BF16 | FULL),
    "generation-qlora": ("generation", FP32 | NF4),
    "teacher": ("teacher", {"kind": "topk", "top_k": 20}),
    "teacher-bf16": ("teacher", {"kind": "full", "dtype": "bfloat16"}),
    "teacher-nf4": ("teacher", {"kind": "full", "quantization": "nf4"}),
}
"""What runs with all layers resident, and with none."""


@dataclass(frozen=True)
class Place:
    """Where cases run."""

    run: Callable[..., list[Any]]
    """`Ranks.run`."""
    real: bool
    ranks: int
    """As many have a device each."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("pretended", marks=pytest.mark.needs("g++")),
        pytest.param("real", marks=pytest.mark.needs("cuda")),
    ],
)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Return the real device, or a process whose torch believes in one that is put in."""
    if request.param == "real":
        import torch

        yield Place(Ranks().run, real=True, ranks=min(2, torch.cuda.device_count()))
        return
    if (TORCH / "lib/libtorch_cuda.so").exists():
        pytest.skip("this torch has CUDA of its own")
    library = build(tmp_path_factory.mktemp("card"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(library))
            executor.submit(Ranks).result()  # which starts the process

        def run(*given: Any, **how: Any) -> list[Any]:
            return executor.submit(Ranks().run, *given, **how).result()

        yield Place(run, real=False, ranks=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_drawn_model(tmp_path_factory.mktemp("drawn") / "model", "qwen3"))


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return one with more layers than slots, whose embedding is looked up in its file."""
    folder = tmp_path_factory.mktemp("drawn") / "deep"
    return str(write_drawn_model(folder, "qwen3", num_hidden_layers=5, tie_word_embeddings=False))


@pytest.mark.parametrize("name", CASES)
def test_a_step_computes_what_the_cpu_computes_and_waits_as_often(
    place: Place, model: str, name: str
) -> None:
    case, settings, waits = CASES[name]
    parts = settings.get("parallel.tensor", 1) * settings.get("parallel.pipeline.stages", 1)
    if parts > place.ranks:
        pytest.skip("no CUDA device for each of two ranks")
    world = place.ranks if case == "rank" else 0
    for found in place.run(f"{HERE}:compare", case, model, settings, place.real, world=world):
        assert found["far"] < (EXACT if settings.get(PRECISION, "fp32") == "fp32" else ROUNDED)
        assert found["waits"] == waits


@pytest.mark.parametrize("fault", ["rotation on the host", "targets on the host"])
def test_tensors_of_both_devices_are_refused(place: Place, model: str, fault: str) -> None:
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        place.run(f"{HERE}:faulty", fault, model, place.real, world=0)


@pytest.mark.parametrize("fault", ["no copy", "no wait for the copy", "no wait for the gradient"])
def test_a_gradient_that_is_read_too_early_is_wrong(place: Place, model: str, fault: str) -> None:
    [found] = place.run(f"{HERE}:faulty", fault, model, place.real, world=0)
    if place.real:
        assert not found["far"] < ROUNDED
    else:
        assert found["far"] != found["far"], "it is NaN there"


def test_a_value_that_the_host_asks_for_is_a_wait(place: Place, model: str) -> None:
    [found] = place.run(f"{HERE}:faulty", "an item in each micro-batch", model, place.real, world=0)
    assert found["far"] < EXACT
    assert found["waits"] == WORKER | {"TorchReplica._compute_loss": 2}


@pytest.mark.parametrize("name", STREAMED)
def test_layers_that_are_copied_at_each_use_give_the_bits_of_resident_ones(
    place: Place, deep_model: str, name: str
) -> None:
    case, settings = STREAMED[name]
    given = case, deep_model, settings, place.real
    [found] = place.run(f"{HERE}:compare_residents", *given, world=0)
    assert found["same"]
    assert found["results"]


@pytest.mark.parametrize(
    "name", ["recomputed", "qlora", "dpo-recomputed", "student", "scores-full", "generation"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_read_gives_the_same_bits_and_a_chunk_of_it_is_there(
    place: Place, model: str, deep_model: str, name: str, tied: bool
) -> None:
    case, settings = STREAMED[name]
    given = case, model if tied else deep_model, settings, place.real
    [found] = place.run(f"{HERE}:compare_heads", *given, world=0)
    assert found["same"]
    assert found["results"]
    assert found["rows"] == 64
    assert (found["together"] > 1) == (case != "generation")


@pytest.fixture
def experts(tiny_model: TinyModel) -> str:
    """Return a mixture of experts with more layers than slots."""
    sizes = {"num_hidden_layers": 3, "moe_intermediate_size": 64, "tie_word_embeddings": False}
    return str(tiny_model("qwen3_moe", **sizes))


ATTENTION = {"lora.target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("name", ["qlora-recomputed", "generation-qlora"])
def test_a_head_of_a_model_of_transformers_is_read_with_the_same_bits(
    place: Place, experts: str, name: str
) -> None:
    case, settings = STREAMED[name]
    given = case, experts, {**settings, **ATTENTION}, place.real
    [found] = place.run(f"{HERE}:compare_heads", *given, world=0)
    assert found["same"]
    assert found["results"]
    assert found["rows"] == 128


@pytest.mark.parametrize("name", ["qlora", "qlora-recomputed", "qlora-packed", "dpo"])
def test_experts_that_are_copied_at_each_use_give_the_bits_of_resident_ones(
    place: Place, experts: str, name: str
) -> None:
    case, settings = STREAMED[name]
    given = case, experts, {**settings, **ATTENTION}, place.real
    [found] = place.run(f"{HERE}:compare_residents", *given, world=0)
    assert found["same"]
    assert found["results"]


def test_experts_that_are_copied_as_they_are_stored_compute_what_the_cpu_does(
    place: Place, experts: str
) -> None:
    """Resident ones are one product of transformers', which has other bits on a card."""
    settings = {**FP32, **ATTENTION, "model.resident": 0}
    [found] = place.run(f"{HERE}:compare", "worker", experts, settings, place.real, world=0)
    assert found["far"] < EXACT


@pytest.mark.parametrize(
    "fault", ["a layer's copy that does not wait", "a layer that does not wait for its copy"]
)
def test_a_layer_that_is_used_too_early_or_too_late_is_wrong(
    place: Place, deep_model: str, fault: str
) -> None:
    if place.real:
        pytest.skip("a real device may be fast enough")
    [found] = place.run(f"{HERE}:faulty", fault, deep_model, False, 0, world=0)
    assert found["far"] != found["far"], "it is NaN there"


def test_page_locked_memory_that_is_read_into_too_early_is_found(
    place: Place, deep_model: str
) -> None:
    if place.real:
        pytest.skip("a real device may be fast enough")
    fault = "a read that does not wait"
    with pytest.raises(RankError, match="before the host waited for its copy"):
        place.run(f"{HERE}:faulty", fault, deep_model, False, 0, world=0)
