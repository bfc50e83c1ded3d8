"""Ranks that share each layer continue texts as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.replica.driving import drawn_weights
from tests.trainer.replica.torch.parallel.one_process import device, mesh_of, run_config
from trainer.model.layout import build_layout
from trainer.replica.sampling import Sampling

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.replica.torch.parallel.test_generator"
PROMPTS = [[7, 8, 9, 10, 11, 12], [75], [110, 120, 130], [200, 3]]
GREEDY: dict[str, Any] = {}
DRAWN = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "seed": 6}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def continued(
    folder: str, settings: dict[str, Any], wishes: list[tuple[dict[str, Any], list[int]]]
) -> list[list[list[int]]]:
    """Return what this rank makes of the prompts, by drawing and tokens that end a text."""
    from trainer.replica.torch.parallel.generator import load_parallel_generator

    config = run_config(folder, settings)
    generator = load_parallel_generator(
        Path(folder),
        config,
        build_layout(Path(folder), config),
        drawn_weights(Path(folder), config),
        mesh_of(1, config.parallel.tensor)["tensor"],
        device(),
        batch=3,
    )
    return [
        generator.generate(
            PROMPTS, max_new_tokens=7, sampling=Sampling(**drawing), stop=frozenset(stop)
        )
        for drawing, stop in wishes
    ]


@pytest.mark.parametrize(
    ("family", "model", "settings"),
    [
        ("qwen3", {}, {"lora.lora_rank": 4}),
        ("qwen2", {"vocab_size": 301}, {"method": "full"}),
        (
            "llama",
            {"tie_word_embeddings": False, "vocab_size": 301},
            {"lora.lora_rank": 4, "model.quantization": "nf4"},
        ),
    ],
    ids=["qwen3-lora", "qwen2-full", "llama-qlora"],
)
def test_tokens_are_those_of_one_process(
    ranks: Ranks,
    drawn_model: DrawnModel,
    family: str,
    model: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Of prompts that differ in length and do not fit into one batch, greedy and drawn."""
    from trainer.replica.torch.generator import load_generator

    folder = drawn_model(family, **model)
    config = run_config(folder, settings)
    layout, weights = build_layout(Path(folder), config), drawn_weights(Path(folder), config)
    alone = load_generator(Path(folder), config, layout, weights, threads=1)

    def wanted(drawing: dict[str, Any], stop: frozenset[int]) -> list[list[int]]:
        sampling = Sampling(**drawing)
        return alone.generate(PROMPTS, max_new_tokens=7, sampling=sampling, stop=stop)

    settings = settings | {"parallel.tensor": 2}
    free, drawn = (wanted(drawing, frozenset()) for drawing in (GREEDY, DRAWN))
    assert free != drawn
    stop = free[1][2]
    ended = wanted(GREEDY, frozenset([stop]))
    assert ended != free
    wishes = [(GREEDY, []), (DRAWN, []), (GREEDY, [stop])]
    found = ranks.run(f"{HERE}:continued", folder, settings, wishes)
    assert found == [[free, drawn, ended]] * 2
