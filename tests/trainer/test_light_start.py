"""What trains loads torch and little more: every import is paid again at each start and restart."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.small_model import SIZES, write_data
from tests.trainer.small_teacher import write_corpus, write_teacher
from tests.waiting import PATIENCE
from trainer.init_model import init_model

pytestmark = pytest.mark.long

LIBRARIES = {
    "accelerate",
    "datasets",
    "jinja2",
    "pandas",
    "peft",
    "pyarrow",
    "scipy",
    "sklearn",
    "sympy",
    "torchvision",
    "transformers",
}
RUN = """
import json, sys
from trainer.cli import main
sys.argv = ["trainer", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(words: list[str]) -> set[str]:
    """Return what a trainer's process has imported when its work is done."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_fine_tune_imports_no_library_that_it_does_not_use(
    tmp_path: Path, quantization: str
) -> None:
    data = write_data(tmp_path / "data.jsonl")
    wide = replace(SIZES, hidden_size=64, head_dim=16)  # NF4 on a CPU takes whole blocks
    model = init_model(data, tmp_path / "model", wide, 0)
    words = [str(model), "--data", str(data), "--num-classes", "3", "--task", "classify"]
    words += ["--method", "lora", "--batch-size", "4", "--max-steps", "2", "--max-seq-len", "64"]
    words += ["--gpu-backend", "cpu", "-o", str(tmp_path / "out"), "--threads", "1"]
    if quantization == "nf4":
        words += ["--set", "model.quantization=nf4"]
    loaded = modules_after(["finetune", *words])
    assert "torch" in loaded
    found = LIBRARIES & loaded
    if quantization == "none":
        assert not found
        assert not {"bitsandbytes", "torch._dynamo", "torch.distributed.tensor"} & loaded
    else:  # its operations bring torch._dynamo, and with that sympy
        assert "bitsandbytes" in loaded
        assert found == {"sympy"}
        assert "torch._inductor.compile_fx" not in loaded


def test_a_teacher_and_a_student_import_what_trains_and_what_shards_need(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "texts.jsonl", 8)
    model = write_teacher(tmp_path / "model", corpus)
    words = [str(model), "--data", str(corpus), "--out", str(tmp_path / "out")]
    words += ["--max-seq-len", "64", "--gpu-backend", "cpu", "--threads", "1"]
    loaded = modules_after(["distill", "teacher", *words])
    assert "torch" in loaded
    assert LIBRARIES & loaded <= {"pyarrow", "pandas"}  # the former looks for the latter
    words = ["--teacher-logits", str(tmp_path / "out"), "--student", str(model)]
    words += ["-o", str(tmp_path / "student"), "--batch-size", "4", "--max-steps", "1"]
    loaded = modules_after(["distill", "student", *words, "--gpu-backend", "cpu", "--threads", "1"])
    assert "torch" in loaded
    assert LIBRARIES & loaded <= {"pyarrow", "pandas"}
    assert "torch._dynamo" not in loaded
