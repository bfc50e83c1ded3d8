"""A replica group's gradient is that of one process; the same split gives the same bits.

Tests import torch themselves: processes that only collect them need none.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cluster.real_process import Process
from tests.trainer.tiny import Tiny
from trainer.config.parallel import GroupStrategy
from trainer.data.tokens import Encoded
from trainer.run.distributed.group.link import pack_samples, unpack_samples
from trainer.run.distributed.group.member import as_user_error
from trainer.run.distributed.group.setup import GroupSetup, compute_identity
from trainer.system.errors import DoesNotFitError, InputError, RefusedError

CASES: dict[str, dict[str, Any]] = {
    "ddp-full-classify": {"strategy": "ddp", "processes": 3, "method": "full"},
    "ddp-lora": {"strategy": "ddp", "task": "causal-lm", "training__pack": True},
    "ddp-qlora-taught": {
        "strategy": "ddp",
        "task": "causal-lm",
        "model__quantization": "nf4",
        "distillation": {"alpha": 0.7},
    },
    "fsdp-full-classify": {"strategy": "fsdp", "method": "full"},
    "tensor-full": {"strategy": "tensor", "task": "causal-lm", "method": "full"},
    "tensor-lora-classify": {"strategy": "tensor"},
    "fsdp-qlora": {
        "strategy": "fsdp",
        "processes": 3,
        "task": "causal-lm",
        "model__quantization": "nf4",
        "training__micro_batch_size": 2,
    },
}

Answers = Mapping[str, Mapping[str, np.ndarray]]


@pytest.fixture(scope="module")
def answers(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return what one program found of all cases."""
    from tests.trainer.replica.driving import taught

    folder = tmp_path_factory.mktemp("groups")
    for name, settings in CASES.items():
        own = dict(settings)
        strategy, processes = own.pop("strategy"), own.pop("processes", 2)
        task = own.setdefault("task", "classify")
        model = tiny.model(saved_as=task)
        batch = tiny.batch(11, task)
        if "distillation" in own:
            batch = taught(batch)
        case = {"model": str(model), "strategy": strategy, "processes": processes}
        (folder / f"{name}.json").write_text(json.dumps(case))
        (folder / f"{name}.yaml").write_text(tiny.config(model, **own).to_yaml())
        save_file(pack_samples(batch), folder / f"{name}.safetensors")
    module = "tests.trainer.run.distributed.group_gradients"
    program = Process("groups", [sys.executable, "-m", module, str(folder)], folder, {})
    try:
        assert program.wait(500) == 0, program.text
    finally:
        program.end()
    found = {name: dict(np.load(folder / f"{name}.npz")) for name in CASES}
    code, said = json.loads((folder / "starved.json").read_text())
    hung, why, records = json.loads((folder / "hung.json").read_text())
    return {
        **found,
        "refused": {"text": np.array((folder / "refused").read_text())},
        "starved": {"code": np.array(code), "text": np.array(said)},
        "hung": {
            "code": np.array(hung),
            "text": np.array(why),
            "kinds": np.array([[e["profiling_name"] for e in r["entries"]][-1] for r in records]),
        },
    }


@pytest.mark.cluster
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_one_process(answers: Answers, case: str) -> None:
    """Up to rounding; the same split gives the same bits."""
    found = answers[case]
    assert found["group"].tobytes() == found["again"].tobytes()
    assert np.linalg.norm(found["single"]) > 0
    for group, single in (("group", "single"), ("few", "few_single")):
        assert np.abs(found[group] - found[single]).max() < 1e-5 * np.abs(found[single]).max()
    assert not found["none"].any()
    np.testing.assert_allclose(found["group_sums"], found["single_sums"], rtol=1e-5)
    assert found["group_order"].tolist() == found["send_order"].tolist()


@pytest.mark.cluster
def test_a_leader_computes_with_the_weights_of_its_worker(answers: Answers) -> None:
    """As a worker of one process, of which the plan of memory is."""
    copied = [name for name, own in CASES.items() if own["strategy"] == "ddp"]
    assert copied
    assert all(bool(answers[name]["leader_shares"]) for name in copied)


@pytest.mark.cluster
def test_a_member_of_another_installation_is_refused(answers: Answers) -> None:
    text = str(answers["refused"]["text"])
    assert text.startswith("rank 1 of the group of 2 (cpu on ")
    assert "its torch differs from that of the leader" in text
    assert "(1.0, not 2." in text
    assert "\n" not in text


@pytest.mark.cluster
def test_a_member_without_memory_ends_the_group_in_one_line(answers: Answers) -> None:
    """A killed and a stopped one are in tests/cluster."""
    text = str(answers["starved"]["text"])
    name = f"rank 1 of the group of 2 (cpu on {os.uname().nodename})"
    assert text.startswith(f"trainer: {name}: the group's model or a micro-batch does not fit; ")
    assert "lower training.micro_batch_size" in text
    assert text.count("\n") == 1
    assert answers["starved"]["code"] == 2


@pytest.mark.cluster
def test_a_hanging_collective_ends_in_time_with_the_absent_member_and_the_last_ones_kept(
    answers: Answers,
) -> None:
    """A member that lives, so that nothing but the timeout ends the others' wait for it."""
    found, name = answers["hung"], f"rank 1 of the group of 3 (cpu on {os.uname().nodename})"
    text = str(found["text"])
    assert text.startswith(f"trainer: {name} did not take part in a collective operation in time: ")
    assert text.count("\n") == 1
    assert "its last collectives are in " in text
    assert "flight-recorder/group-" in text
    assert found["code"] == 3
    assert found["kinds"].tolist() == ["gloo:broadcast"]


@pytest.mark.parametrize("allocator", ["torch", "numpy"])
def test_memory_that_runs_out_is_an_error_for_people(allocator: str) -> None:
    """By torch's allocator on the CPU, by NumPy and on a GPU."""
    import torch

    allocate = np.empty if allocator == "numpy" else partial(torch.empty, dtype=torch.uint8)
    with pytest.raises((RuntimeError, MemoryError)) as failure:
        allocate(1 << 50)
    for error in (failure.value, torch.OutOfMemoryError("CUDA out of memory. Tried ...")):
        known = as_user_error(error)
        assert isinstance(known, DoesNotFitError)
        assert "lower training.micro_batch_size" in str(known)
    assert as_user_error(RuntimeError("something else")) is None


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("tensor", {}, "parallel.tensor 3 does not divide its 4 attention heads"),
        (
            "fsdp",
            {"distillation": {"alpha": 0.7}},
            "--strategy fsdp does not compute",
        ),
        ("ddp", {"distillation": {"alpha": 0.7}}, ""),
        ("fsdp", {}, ""),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(
    tiny: Tiny, strategy: GroupStrategy, settings: dict[str, Any], message: str
) -> None:
    model = tiny.model()
    config = tiny.config(model, task="causal-lm", **settings)
    setup = GroupSetup(config, model, "cpu", strategy, ("cpu",) * 3, 1, "store")
    with pytest.raises(InputError, match=message) if message else nullcontext():
        setup.check_strategy()
    assert GroupSetup.from_json(json.loads(json.dumps(setup.to_json()))) == setup


@pytest.mark.parametrize("what", ["config", "layout", "model", "torch"])
def test_a_member_with_another_of_these_is_named(tiny: Tiny, what: str) -> None:
    """A real member with another torch is above."""
    from trainer.run.distributed.group.replica import check_identities

    model = tiny.model()
    own = compute_identity(
        GroupSetup(tiny.config(model), model, "cpu", "ddp", ("cpu",) * 3, 1, "store")
    )
    members: Any = SimpleNamespace(name_rank=lambda rank: f"rank {rank}")
    check_identities(own, [own, own], members)
    message = (
        rf"^rank 2: its {what} differs from that of the leader on .*"
        rf"\(other, not {re.escape(own[what])}\)"
    )
    with pytest.raises(RefusedError, match=message):
        check_identities(own, [own, own | {what: "other"}], members)


def test_samples_arrive_as_they_were_sent(tiny: Tiny) -> None:
    from tests.trainer.replica.driving import taught

    for batch in (tiny.batch(12), taught(tiny.batch(3, "causal-lm"), temperature=2.0)):
        back = unpack_samples(pack_samples(batch))
        assert len(back) == len(batch)
        for one, other in zip(batch, back, strict=True):
            assert same(one, other)


def same(one: Encoded, other: Encoded) -> bool:
    assert type(one.labels) is type(other.labels)
    assert (one.soft is None) == (other.soft is None)
    parts = [(one.input_ids, other.input_ids), (one.labels, other.labels)]
    if one.soft is not None and other.soft is not None:
        names = ("offsets", "ids", "weights", "rest", "entropy", "temperature")
        parts += [(getattr(one.soft, name), getattr(other.soft, name)) for name in names]
    return all(np.array_equal(a, b) for a, b in parts)


def test_each_sample_is_given_to_one_process_and_tokens_are_balanced() -> None:
    from trainer.run.distributed.group.replica import divide_by_tokens

    lengths = [40, 3, 17, 17, 9, 30, 8, 1]
    parts = divide_by_tokens(lengths, 3)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in part) for part in parts]
    assert max(totals) - min(totals) <= 9
    assert divide_by_tokens(lengths, 3) == parts
    assert divide_by_tokens([5], 3) == [[0], [], []]
