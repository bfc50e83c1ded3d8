"""`generate` and `evaluate` with --parallel, as torchrun starts them."""

from __future__ import annotations

import json
from pathlib import Path

import click
import click.testing
import pytest

from tests.conftest import MakeConfig
from tests.distributed_ranks import Ranks
from tests.trainer.evaluate.test_generation import write_adapter
from trainer.commands.evaluate import evaluate
from trainer.commands.generate import generate
from trainer.system.errors import InputError

UNDER_TORCHRUN = "tests.trainer.run.distributed.commands_in_turn:under_torchrun"
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.mark.parametrize(
    ("command", "words", "variables", "message"),
    [
        (generate, ["--parallel", "tensor=2"], {}, "torchrun --nproc-per-node 2"),
        (generate, ["--parallel", "tensor"], TORCHRUN, "give KEY=VALUE"),
        (generate, ["--parallel", "tensor=[2"], TORCHRUN, "not valid YAML"),
        (generate, ["--parallel", "tensors=2"], TORCHRUN, "tensors"),
        (generate, ["--parallel", "tensor=3"], TORCHRUN, "does not divide the world of 2"),
        (generate, ["--parallel", "tensor=1"], TORCHRUN, "generate only with tensor=2"),
        (generate, ["--parallel", "tensor=2,sequence=true"], TORCHRUN, "only with tensor=2"),
        (generate, ["--parallel", "tensor=2", "--gpu", "0"], TORCHRUN, "--gpu 0: with --parallel"),
        (
            generate,
            ["--parallel", "tensor=4"],
            TORCHRUN | {"WORLD_SIZE": "4"},
            "parallel.tensor 4 does not divide its 2 key-value heads",
        ),
        (
            generate,
            ["--parallel", "tensor=1"],
            TORCHRUN | {"RANK": "1"},
            "rank 1: --parallel: 2 processes generate",
        ),
        (evaluate, ["--parallel", "tensor=3"], TORCHRUN, "does not divide the world of 2"),
        (
            evaluate,
            ["--parallel", "tensor=4"],
            TORCHRUN | {"WORLD_SIZE": "4"},
            "parallel.tensor 4 does not divide its 2 key-value heads",
        ),
    ],
)
def test_what_is_refused_before_torch(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    data: Path,
    command: click.Command,
    words: list[str],
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if command is generate:
        given = [str(model), "--prompt", "echo"]
    else:
        texts = data.parent / "texts.jsonl"
        texts.write_text('{"text": "echo hello"}\n')
        given = [str(model), "--data", str(texts)]
    result = click.testing.CliRunner().invoke(command, [*given, *words])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_watch_runs_alone() -> None:
    words = ["--watch", "run", "--parallel", "tensor=2"]
    result = click.testing.CliRunner().invoke(evaluate, words)
    assert result.exit_code == 2
    assert "--parallel belongs to MODEL" in result.output


def test_an_adapter_under_torchrun(
    ranks: Ranks, model: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    """One rank prints: tokens of one process, greedy and drawn, and its scores of every sample."""
    output = write_adapter(tmp_path / "output", model, make_config)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "echo {word} | sort"}}\n' for word in "abcde"))
    words = [str(output), "--prompt", "echo hello", "--prompt", "rm", "--max-new-tokens", "6"]
    words += ["--temperature", "1.2", "--seed", "3", "--json", "--gpu-backend", "cpu"]
    scored = [str(output), "--data", str(texts), "--json", "--gpu-backend", "cpu"]
    alone = [
        click.testing.CliRunner().invoke(command, given)
        for command, given in ((generate, words), (evaluate, scored))
    ]
    assert [one.exit_code for one in alone] == [0, 0], [one.output for one in alone]
    commands = [
        ["generate", *words, "--parallel", "tensor=2"],
        ["evaluate", *scored, "--parallel", "data=fsdp"],
        ["evaluate", *scored, "--parallel", "tensor=2,sequence=true"],
        ["evaluate", *scored, "--parallel", "pipeline.stages=2"],
    ]
    ((printed, log), other) = ranks.run(UNDER_TORCHRUN, commands, world=0, patience=280)[0]
    assert other[0] == ""
    *tokens, sharded, cut, staged = (json.loads(line) for line in printed.splitlines())
    assert tokens == [json.loads(line) for line in alone[0].stdout.splitlines()]
    assert "on 2 x cpu" in log
    wanted = json.loads(alone[1].stdout)
    assert wanted["count"] == 5
    for scores in (sharded, cut, staged):
        for name in ("loss", "perplexity"):
            assert scores.pop(name) == pytest.approx(wanted[name], rel=1e-5)
        assert scores.items() <= wanted.items()
