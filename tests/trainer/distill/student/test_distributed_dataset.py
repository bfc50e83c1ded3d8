"""A whole folder of logits as samples: each window once an epoch, each shard read once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.bigram_teacher import BigramTeacher
from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig, load_config
from trainer.data.encoder import IGNORED
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.student.distributed_dataset import (
    GROUP,
    DistillationDataset,
    content_digest,
    logits_folder,
)
from trainer.distill.student.prefetch import Preparation
from trainer.run.inputs import read_inputs
from trainer.system.errors import InputError, RefusedError, StorageError

SHARDS, WINDOWS = 11, 5


@pytest.fixture(scope="module")
def teacher(model: Path) -> BigramTeacher:
    return BigramTeacher(model, shards=SHARDS, windows=WINDOWS)


@pytest.fixture
def logits(teacher: BigramTeacher, tmp_path: Path) -> LogitsFolder:
    return teacher.write(tmp_path / "logits")


def configure(model: Path, train: Path, **settings: Any) -> RunConfig:
    tree = {
        "task": "causal-lm",
        "model.path": str(model),
        "data.train": str(train),
        "distillation.alpha": 0.7,
    }
    return load_config(
        None, tree | {key.replace("__", "."): value for key, value in settings.items()}
    )


def samples(folder: LogitsFolder, config: RunConfig) -> DistillationDataset:
    assert config.distillation is not None
    scheme = folder.description.scheme
    return DistillationDataset(
        folder, Preparation(scheme, config.distillation, config.data.max_seq_len)
    )


def test_every_window_is_a_sample(
    model: Path, logits: LogitsFolder, teacher: BigramTeacher
) -> None:
    dataset = samples(logits, configure(model, logits.path))
    assert len(dataset) == SHARDS * WINDOWS
    for number in (0, WINDOWS - 1, WINDOWS, SHARDS * WINDOWS - 1):
        window = teacher.written[number // WINDOWS][number % WINDOWS]
        sample = dataset[number]
        assert sample.input_ids.tolist() == window.tokens.tolist()
        assert isinstance(sample.labels, np.ndarray)
        assert sample.labels.tolist() == [IGNORED, *window.tokens[1:].tolist()]
        assert sample.soft is not None
        assert sample.soft.offsets.tolist() == window.scores.offsets.tolist()
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_an_epoch_reads_each_shard_once(
    model: Path, logits: LogitsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = logits.read_shard

    def watched(number: int) -> Sequence[Window]:
        read.append(number)
        return real(number)

    monkeypatch.setattr(logits, "read_shard", watched)
    dataset = samples(logits, configure(model, logits.path))
    orders: list[list[int]] = []
    for epoch in range(3):
        read.clear()
        order = dataset.permute_windows(4, epoch, len(dataset))
        orders.append(order.tolist())
        assert sorted(orders[-1]) == list(range(len(dataset)))
        for index in order:
            assert dataset[int(index)].soft is not None
        assert len(read) == len(set(read))
        assert epoch or len(read) == SHARDS
    assert orders[0] != orders[1] != orders[2]
    assert (
        orders[0]
        == samples(logits, configure(model, logits.path)).permute_windows(4, 0, 55).tolist()
    )
    assert orders[0] != dataset.permute_windows(5, 0, len(dataset)).tolist()
    shards = [index // WINDOWS for index in orders[0][: GROUP * WINDOWS]]
    assert len(set(shards)) == GROUP
    assert shards != sorted(shards, key=shards.index)  # mixed within the group


def test_the_digest_is_of_the_bytes(
    model: Path, logits: LogitsFolder, teacher: BigramTeacher, tmp_path: Path
) -> None:
    same = teacher.write(tmp_path / "same")
    assert content_digest(same) == content_digest(logits)
    again = BigramTeacher(model, shards=SHARDS, windows=WINDOWS)
    again.written[3][0].scores.tail[1] += np.float32(1e-3)
    other = again.write(tmp_path / "other")
    assert other.digest == logits.digest
    assert content_digest(other) != content_digest(logits)
    config = configure(model, logits.path)
    jobs = [
        read_inputs(configure(model, folder.path), "run").job for folder in (logits, same, other)
    ]
    assert jobs[0] == jobs[1]
    assert jobs[0].data_digest != jobs[2].data_digest
    assert (
        config.agreement_digest()
        != configure(model, logits.path, distillation__alpha=0.6).agreement_digest()
    )


def test_a_folder_that_is_not_whole_is_refused(
    model: Path, teacher: BigramTeacher, tmp_path: Path
) -> None:
    folder = teacher.write(tmp_path / "logits", range(SHARDS - 2))
    config = configure(model, folder.path)
    with pytest.raises(InputError, match=r"2 of 11 shards are missing .* shard-00009; .* student"):
        logits_folder(config, model)
    for number in (9, 10):
        folder.write_shard(number, teacher.written[number])
    assert logits_folder(config, model) is not None
    shard = folder.shard_path(4) / "logits.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"1 of 11 shards .* shard-00004"):
        logits_folder(config, model)


def test_a_damaged_shard_is_an_error_and_no_sample(model: Path, logits: LogitsFolder) -> None:
    dataset = samples(logits, configure(model, logits.path))
    shard = logits.shard_path(1) / "logits.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert dataset[0].soft is not None
    with pytest.raises(StorageError, match="shard-00001"):
        dataset[WINDOWS]


def test_config_and_data_fit_together(
    model: Path, data: Path, logits: LogitsFolder, tmp_path: Path
) -> None:
    plain = load_config(
        None, {"task": "causal-lm", "model.path": str(model), "data.train": str(data)}
    )
    assert logits_folder(plain, model) is None
    with pytest.raises(InputError, match=r"data\.train is a folder that `trainer distill teacher`"):
        logits_folder(configure(model, data), model)
    with pytest.raises(InputError, match="no teacher has started here"):
        logits_folder(configure(model, tmp_path), model)
    tree = {"task": "causal-lm", "model.path": str(model), "data.train": str(logits.path)}
    with pytest.raises(InputError, match=r"--set distillation\.alpha"):
        logits_folder(load_config(None, tree), model)
    bare = BigramTeacher(model, shards=1, scheme=Scheme(kind="topk", top_k=6, tail_samples=0))
    config = configure(model, bare.write(tmp_path / "bare").path, distillation__temperature=2.0)
    with pytest.raises(InputError, match="cannot be converted"):
        logits_folder(config, model)


def test_another_tokenizer_is_refused(logits: LogitsFolder, tmp_path: Path) -> None:
    stranger = write_model(tmp_path / "stranger", write_data(tmp_path / "few.jsonl", count=7))
    with pytest.raises(RefusedError, match=r"tokenizer \([0-9a-f]{16}\) .* \([0-9a-f]{16}\)"):
        read_inputs(configure(stranger, logits.path), "run")


def test_the_coordinator_needs_neither_parquet_nor_torch(
    model: Path, logits: LogitsFolder, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "from trainer.run.composition import run as build\n"
        "from trainer.config import run as config\n"
        "from trainer.run.inputs import read_inputs\n"
        "settings = config.load_config(sys.argv[1])\n"
        "inputs = read_inputs(settings, 'run')\n"
        "_, recorder = build.make_coordinator(inputs, 1, 0.0)\n"
        "recorder.close(0, 'done')\n"
        "assert not {'torch', 'pyarrow', 'transformers', 'wgpu'} & set(sys.modules)\n"
    )
    run_file = tmp_path / "run.yaml"
    config = configure(model, logits.path, output=str(tmp_path / "out"))
    run_file.write_text(config.to_yaml())
    ended = subprocess.run(
        [sys.executable, "-c", code, str(run_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "step 0/4" in ended.stderr  # 55 windows in batches of 16
