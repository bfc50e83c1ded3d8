"""Each launcher's variables, and what is missing from them, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trainer.commands.finetune import finetune
from trainer.run.composition import roles
from trainer.run.distributed.environment import Environment, read_environment
from trainer.system.errors import InputError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04,7],login",
    "SLURM_JOB_ID": "123456",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train"}


@pytest.mark.parametrize(
    ("variables", "flags", "found"),
    [
        (TORCHRUN, {}, (3, 8, 1, "node1", 1234)),
        (SLURM, {}, (5, 8, 1, "gpu03", 29500 + 3456)),
        (SLURM | {"SLURM_STEP_NODELIST": "alone"}, {}, (5, 8, 1, "alone", 29500 + 3456)),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b2"}, {}, (5, 8, 1, "a1", 29500 + 3456)),
        (SLURM | {"SLURM_STEP_NODELIST": "a,gpu[1-2]"}, {}, (5, 8, 1, "a", 29500 + 3456)),
        (SLURM | {"MASTER_ADDR": "n", "MASTER_PORT": "5"}, {}, (5, 8, 1, "n", 5)),
        (KUBERNETES, {}, (1, 4, None, "train-0.train", 29500)),
        ({}, {"rank": 1, "world_size": 2, "master": "a:7"}, (1, 2, None, "a", 7)),
        ({}, {"rank": 1, "world_size": 2, "master": "[fe80::1]:7"}, (1, 2, None, "fe80::1", 7)),
        ({}, {"rank": 0, "world_size": 1}, (0, 1, None, "127.0.0.1", 29500)),
        (TORCHRUN, {"rank": 0, "world_size": 2, "master": "a:7"}, (0, 2, None, "a", 7)),
    ],
)
def test_environments(
    variables: dict[str, str], flags: dict[str, Any], found: tuple[Any, ...]
) -> None:
    got = read_environment(variables, **flags)
    assert (got.rank, got.world_size, got.local_rank, got.host, got.port) == found
    assert isinstance(got, Environment)


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({}, {}, "neither torchrun, Slurm nor a Kubernetes Indexed Job started this process"),
        ({}, {"rank": 1, "master": "a:7"}, "the flags: WORLD_SIZE is not set; give --world-size"),
        ({}, {"rank": 2, "world_size": 2}, "the flags: rank 2 is outside a world of 2"),
        ({}, {"rank": 1, "world_size": 2}, "MASTER_ADDR, the address of rank 0, is not set"),
        ({}, {"rank": 1, "world_size": 2, "master": "a"}, "--master a: must be HOST:PORT"),
        ({}, {"rank": 1, "world_size": 2, "master": "a:99999"}, "--master a:99999: must be HOST"),
        (TORCHRUN | {"RANK": "x"}, {}, "torchrun's variables: RANK=x must be a number, 0 or more"),
        (TORCHRUN | {"MASTER_PORT": "x"}, {}, "MASTER_PORT=x is not a number"),
        (KUBERNETES | {"WORLD_SIZE": "1"}, {}, "the Kubernetes Job: rank 1 is outside a world"),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, "the Kubernetes Job: WORLD_SIZE is not set; give --wo"),
    ],
)
def test_what_is_wrong_is_one_line(
    variables: dict[str, str], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_environment(variables, **flags)
    assert "\n" not in str(error.value)


def test_a_restart_by_torchrun_is_told_from_the_attempt_before() -> None:
    """The store of its agent keeps what the ranks wrote before they crashed."""
    elastic = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}
    found = read_environment(elastic)
    assert (found.by_torchrun, found.attempt) == (True, "2")
    assert not read_environment(elastic, rank=0, world_size=2, master="a:7").by_torchrun


def test_distillation_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, model: Path, data: Path
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr(roles, "read_inputs")  # any attempt to load would fail otherwise
    words = [str(model), "--data", str(data), "--distributed", "--set", "task=causal-lm"]
    words += ["--set", "data.validation_fraction=0", "--set", "distillation.alpha=0.7"]
    error = CliRunner().invoke(finetune, words).exception
    assert isinstance(error, InputError)
    assert "--distributed trains on samples, not on a teacher's logits" in str(error)
    assert "\n" not in str(error)
