"""lm-eval's own figures on a checkpoint, against the same question asked of transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer import small_model as small
from trainer.checkpoint.trained_model import load_trained
from trainer.evaluate.tasks import TaskOptions, make_tasks
from trainer.replica.backend import Compute
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.evaluate.base import Task

installed = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not installed, reason="needs lm-eval")

TASK = """\
task: what_follows
dataset_path: json
dataset_kwargs:
  data_files: {{"test": "{data}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small.write_model(tmp_path / "model", small.write_data(tmp_path / "train.jsonl"))


@pytest.fixture
def questions(tmp_path: Path) -> list[dict[str, Any]]:
    made = [
        {
            "question": f"{words} # {number}",
            "choices": [" ls", " mkdir build", " echo"],
            "answer": number % 3,
        }
        for number, words in enumerate(small.WORDS * 4)
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in made))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "what_follows.yaml").write_text(TASK.format(data=data))
    return made


def harness(tmp_path: Path, name: str, limit: int | None = None) -> Task:
    material = TaskOptions(harness_tasks=tmp_path / "tasks", harness_limit=limit)
    (task,) = make_tasks(f"lm-eval:{name}", material)
    return task


@needs_lm_eval
@pytest.mark.filterwarnings("ignore")  # what lm-eval and datasets warn of is not ours to mend
def test_a_task_of_our_own_without_a_network(
    tmp_path: Path,
    model: Path,
    questions: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    trained = load_trained(model)
    outcome = harness(tmp_path, "what_follows").run(trained, Compute("wgpu", threads=1))
    assert (outcome.rated_by, outcome.rating) == ("acc", outcome.figures["acc"])
    right = [_likeliest(model, line) == line["answer"] for line in questions]
    assert 0 < sum(right) < len(right), "or it would prove nothing"
    assert outcome.figures == {"acc": pytest.approx(sum(right) / len(right))}
    few = harness(tmp_path, "what_follows", limit=3).run(trained, Compute("cpu", threads=1))
    assert few.figures == {"acc": pytest.approx(sum(right[:3]) / 3)}


@needs_lm_eval
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_lm_eval_does_not_know(tmp_path: Path, questions: list[Any]) -> None:
    with pytest.raises(InputError, match="lm-eval has no 'nonsense'"):
        harness(tmp_path, "nonsense")


@pytest.mark.skipif(installed, reason="needs lm-eval not to be there")
def test_without_lm_eval_its_tasks_are_refused() -> None:
    with pytest.raises(InputError, match=r"pip install 'motley\[lm-eval\]'"):
        make_tasks("lm-eval:arc_easy", TaskOptions())


def _likeliest(model: Path, line: dict[str, Any]) -> int:
    """Return the choice with the highest log-probability after the question."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    start = len(tokenizer(line["question"]).input_ids)
    sums: list[float] = []
    for choice in line["choices"]:
        ids = torch.tensor(tokenizer(line["question"] + choice).input_ids)
        with torch.no_grad():
            scores = network(ids[None]).logits[0].log_softmax(-1)
        chosen = scores[:-1].gather(1, ids[1:, None])[start - 1 :]
        sums.append(float(chosen.sum()))
    return max(range(len(sums)), key=sums.__getitem__)
