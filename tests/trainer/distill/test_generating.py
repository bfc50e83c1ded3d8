"""A teacher's answers: each prompt once, the same in any batch, shard and process, and as data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.trainer.small_model import write_family
from tests.trainer.small_teacher import teach, wish, write_corpus, write_teacher
from trainer.commands.distill.generate import generate
from trainer.commands.distill.verify import verify
from trainer.config.run import load_config
from trainer.data.samples import read_samples
from trainer.distill.answers.answer import Answer
from trainer.distill.answers.description import find_answer_faults
from trainer.distill.answers.folder import ANSWERS_FILE, AnswersFolder
from trainer.distill.student.distributed_dataset import logits_folder
from trainer.distill.teacher.generation import AnswerRequest, AnswerRun, assign_answers
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError, RefusedError, StorageError
from trainer.system.process.interruption import Interrupted

if TYPE_CHECKING:
    from trainer.config.run import Resident
    from trainer.distill.answers.author import Generate
    from trainer.distill.teacher.generation import AnswerAssignment

PROMPTS: list[dict[str, Any]] = [
    {"text": "def f1"},
    {"messages": [{"role": "user", "content": "Add 1 and 2."}]},
    {"prompt": "def f2(x): return", "completion": "what was there"},
    {
        "messages": [
            {"role": "user", "content": "Add 1."},
            {"role": "assistant", "content": "x + 1"},
            {"role": "user", "content": "And 2."},
            {"role": "assistant", "content": "what was there"},
        ]
    },
    {"text": "return x + 3 def"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("author")
    return write_teacher(folder / "model", write_corpus(folder / "texts.jsonl"), head_scale=4.0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    return file


@pytest.fixture
def ask(model: Path, prompts: Path, tmp_path: Path) -> Callable[..., AnswerAssignment]:
    def asked(name: str, **changes: Any) -> AnswerAssignment:
        settings: dict[str, Any] = {
            "samples": 2,
            "max_new_tokens": 12,
            "prompts_per_shard": 2,
            "sampling": Sampling(temperature=1.0, seed=3),
            "prompts": prompts,
            "dtype": "float32",
        }
        output = tmp_path / name
        settings["model"] = str(model)
        return assign_answers(AnswerRequest(output=output, **settings | changes))

    return asked


def loaded(assignment: AnswerAssignment, batch: int = 4, resident: Resident = "auto") -> Generate:
    from trainer.distill.teacher.torch_author import open_generate
    from trainer.replica.backend import Compute

    compute = Compute("cpu", threads=1, resident=resident)
    return open_generate(assignment.model_dir, "float32", compute, batch, assignment.slots)


def answer(assignment: AnswerAssignment, batch: int = 4, **options: Any) -> list[Answer]:
    AnswerRun(assignment, lambda: loaded(assignment, batch), **options).make_shards()
    return answers(assignment.folder)


def answers(folder: AnswersFolder) -> list[Answer]:
    return [each for plan in folder.plans for each in folder.read_shard(plan.number)]


def told(found: list[Answer]) -> list[tuple[Any, ...]]:
    return [(e.document, e.sample, e.prompt, e.text, e.tokens.tolist(), e.ended) for e in found]


def test_each_prompt_is_answered_once_and_scored_as_by_prefill(
    ask: Callable[..., AnswerAssignment], model: Path
) -> None:
    import torch

    from trainer.distill.teacher.torch_engine import TorchEngine

    found = answer(ask("out"))
    assert [(each.document, each.sample) for each in found] == [
        (document, sample) for document in range(5) for sample in range(2)
    ]
    assert all(1 <= len(each.logprobs) <= 12 for each in found)
    assert len({each.text for each in found if each.document == 0}) == 2, "samples differ"
    teacher = TorchEngine(model, torch.float32)
    for each in found:
        (logits,) = teacher.iterate_logits([each.tokens])
        log_p = logits.log_softmax(-1)[each.prompt_length - 1 :]
        new = torch.tensor(each.tokens[each.prompt_length :].astype(np.int64))
        expected = log_p.gather(1, new[:, None])[:, 0].numpy()
        np.testing.assert_allclose(each.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "olmo2"])
def test_answers_are_those_of_the_resident_teacher(
    ask: Callable[..., AnswerAssignment],
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
) -> None:
    caplog.set_level("INFO")
    folder = model if family == "qwen3" else write_family(tmp_path / "model", model, family)
    whole, streamed = (ask(name, model=str(folder)) for name in ("whole", "streamed"))
    AnswerRun(streamed, lambda: loaded(streamed, resident=0)).make_shards()
    np.testing.assert_equal(told(answers(streamed.folder)), told(answer(whole)))
    assert ": 0 of 2 layers stay in memory, 2 are read from" in caplog.text


def test_batches_shards_and_parts_change_no_answer(ask: Callable[..., AnswerAssignment]) -> None:
    whole = answer(ask("whole"))
    np.testing.assert_equal(told(answer(ask("single"), batch=1)), told(whole))
    np.testing.assert_equal(told(answer(ask("large", prompts_per_shard=5), batch=16)), told(whole))
    halves = ask("halves")
    AnswerRun(halves, lambda: loaded(halves), share=(2, 2)).make_shards()
    assert halves.folder.list_missing() == [0, 2]
    np.testing.assert_equal(told(answer(halves, share=(1, 2))), told(whole))


def test_an_interrupted_pass_goes_on_with_what_is_missing(
    ask: Callable[..., AnswerAssignment],
) -> None:
    whole = answer(ask("whole"))
    stopped = ask("stopped")

    def stop() -> None:
        if stopped.folder.is_described and stopped.folder.has_shard(0):
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        answer(stopped, check=stop)
    missing = stopped.folder.list_missing()
    assert missing
    assert 0 not in missing
    kept = stopped.folder.shard_path(0) / ANSWERS_FILE
    before = kept.stat().st_mtime_ns, kept.read_bytes()
    np.testing.assert_equal(told(answer(ask("stopped"))), told(whole))
    assert (kept.stat().st_mtime_ns, kept.read_bytes()) == before


def test_the_folder_is_data_for_students_and_teachers(
    ask: Callable[..., AnswerAssignment], model: Path, tmp_path: Path
) -> None:
    assignment = ask("out")
    found = [each for each in answer(assignment) if not each.blank]
    samples = read_samples(assignment.folder.path, "causal-lm")
    assert len(samples) == len(found)
    for sample, each in zip(samples, found, strict=True):
        if isinstance(each.prompt, str):
            assert (sample.prompt, sample.text) == (each.prompt, each.text)
            continue
        *asked, last = sample.messages
        assert last.learned
        assert last.content == each.text
        assert [turn.content for turn in asked] == [turn.content for turn in each.prompt]
        assert not any(turn.target for turn in asked), "earlier answers are context"
    scored = teach(wish(model, assignment.folder.path, tmp_path / "logits"))
    assert scored.description.corpus.documents == len(found)
    tree = {
        "task": "causal-lm",
        "model.path": str(model),
        "data.train": str(assignment.folder.path),
    }
    assert logits_folder(load_config(None, tree), model) is None, "trained on as any other data"
    with pytest.raises(InputError, match="contains generated answers, not logits"):
        logits_folder(load_config(None, tree | {"distillation.alpha": 0.5}), model)
    (assignment.folder.shard_path(1) / "manifest.json").unlink()
    with pytest.raises(InputError, match="1 of 3 shards are missing, such as shard-00001"):
        read_samples(assignment.folder.path, "causal-lm")


def test_a_blank_answer_is_no_row_but_is_there(ask: Callable[..., AnswerAssignment]) -> None:
    assignment = ask("out", samples=1)
    answer(assignment)
    folder, plan = assignment.folder, assignment.folder.shard_plan(0)
    first, second = folder.read_shard(0)
    blank = replace(first, text=" ")
    from trainer.distill.answers.file import decode_answers, encode_answers

    content = bytes(encode_answers(folder.digest, plan, [blank, second]))
    again = decode_answers(folder.digest, plan, content)
    assert [each.blank for each in again] == [True, second.blank]
    assert again[0].tokens.tolist() == first.tokens.tolist()
    assert not find_answer_faults(folder.description, plan, again)
    assert find_answer_faults(folder.description, plan, again[1:]) == [
        "answer 0 to prompt 0 is missing"
    ]
    assert find_answer_faults(folder.description, plan, [*again, again[1]]) == [
        "answer 0 to prompt 1 comes twice"
    ]


def test_a_text_ends_an_answer(ask: Callable[..., AnswerAssignment]) -> None:
    free = answer(ask("free", samples=1))
    mark = max((each.text for each in free), key=len)[2:4]
    found = answer(ask("stopped", samples=1, stops=[mark]))
    assert any(each.ended and not before.ended for each, before in zip(found, free, strict=True))
    for each, before in zip(found, free, strict=True):
        assert mark not in each.text
        assert each.text == before.text.partition(mark)[0]
        assert len(each.tokens) <= len(before.tokens)


def test_a_line_end_ends_an_answer_too(ask: Callable[..., AnswerAssignment]) -> None:
    assignment = ask("out", stops=["\n", "\x1b[0m"])
    answer(assignment)
    assert AnswersFolder(assignment.folder.path).description.stop_strings == ("\n", "\x1b[0m")


def test_a_model_that_is_replaced_while_it_is_loaded_is_refused(
    ask: Callable[..., AnswerAssignment], model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assignment = ask("out", model=str(copy))

    def replaced() -> Generate:
        found = loaded(assignment)
        other = write_teacher(tmp_path / "other", write_corpus(tmp_path / "texts.jsonl"), seed=1)
        (other / "model.safetensors").replace(copy / "model.safetensors")
        return found

    with pytest.raises(InputError, match="was changed while it was loaded; start again"):
        AnswerRun(assignment, replaced).make_shards()
    assert not assignment.folder.is_described


def test_other_settings_and_what_does_not_fit_are_refused(
    ask: Callable[..., AnswerAssignment], tmp_path: Path
) -> None:
    answer(ask("out"))
    with pytest.raises(RefusedError, match=r"sampling\.temperature is 1\.0 there and 0\.5 here"):
        ask("out", sampling=Sampling(temperature=0.5, seed=3))
    with pytest.raises(RefusedError, match="samples is 2 there and 3 here"):
        ask("out", samples=3)
    with pytest.raises(InputError, match=r"more than the model's 2048 positions; lower --max-new"):
        ask("long", max_new_tokens=2048)
    tools = tmp_path / "tools.jsonl"
    turn = {"role": "user", "content": "Add."}
    tools.write_text(json.dumps({"messages": [turn], "tools": [{"name": "add"}]}) + "\n")
    with pytest.raises(InputError, match="has tools"):
        ask("tools", prompts=tools)


def test_the_commands_write_and_verify(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(model), "--prompts", str(prompts), "--out", "out", "--samples", "2"]
    words += ["--max-new-tokens", "4", "--shard-prompts", "3", "--gpu-backend", "cpu"]
    words += ["--threads", "1", "--dtype", "float32", "--top-p", "0.9"]
    done = CliRunner().invoke(generate, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "out: 2 shards of 10 answers" in done.output
    seen = CliRunner().invoke(verify, ["out", "--complete"], catch_exceptions=False)
    assert "2 of 2 shards are whole: 10 of 10 answers, each exactly once" in seen.output
    file = tmp_path / "out" / "shard-00001" / ANSWERS_FILE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    broken = CliRunner().invoke(verify, ["out"])
    assert isinstance(broken.exception, StorageError)
    assert "damaged: shard-00001" in str(broken.exception)
    CliRunner().invoke(generate, words, catch_exceptions=False)
    CliRunner().invoke(verify, ["out", "--complete"], catch_exceptions=False)
