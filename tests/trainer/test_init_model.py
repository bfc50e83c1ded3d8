"""init-model makes an ordinary Hugging Face folder, the same bytes every time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trainer import small_model as small
from tests.trainer.data.datasets import load_dataset
from trainer.init_model import ModelSizes, init_model
from trainer.model.files import model_digest, resolve_model
from trainer.system.errors import InputError


def test_transformers_loads_it(model: Path) -> None:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = 'for f in *; do\n    echo "ünïcode $f 2026"\ndone'
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token_id == transformers.AutoConfig.from_pretrained(model).pad_token_id

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        model, output_loading_info=True
    )  # pyright: ignore[reportGeneralTypeIssues]  # the stubs miss output_loading_info
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    loss = loaded(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    # Untrained: close to guessing among all tokens.
    assert float(loss.detach()) == pytest.approx(np.log(loaded.config.vocab_size), rel=0.05)


def test_our_tokens_are_those_of_transformers(model: Path, data: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    samples = load_dataset(data, model, "classify", 3, 512)
    text = f"{small.WORDS[1]} # {7919 % 1000}"
    assert samples[1].input_ids.tolist() == tokenizer(text).input_ids


def test_same_seed_same_bytes_in_another_process(model: Path, data: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.init_model import *;"
        "init_model(Path(sys.argv[1]), Path(sys.argv[2]),"
        f" {small.SIZES!r}); print({{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(data), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.stdout.strip() == "set()"
    for path in model.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    other = small.write_model(tmp_path / "other", data, seed=1)
    assert model_digest(other) != model_digest(model) == model_digest(tmp_path / "again")


def test_the_digest_sees_weights_config_and_tokenizer(data: Path, tmp_path: Path) -> None:
    folder = small.write_model(tmp_path / "model", data)
    (folder / "chat_template.jinja").write_text("{{- messages }}")
    digests = {model_digest(folder)}
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        path = folder / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        digests.add(model_digest(folder))
    assert len(digests) == 5
    (folder / "README.md").write_text("notes do not count")
    assert model_digest(folder) in digests


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"num_heads": 5}, "cannot share"),
        ({"head_dim": 7}, "must be even"),
        ({"vocab_size": 100}, "at least 260"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelSizes(**sizes)


def test_nothing_is_overwritten_or_left_half_done(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine").touch()
    with pytest.raises(InputError, match="exists already"):
        init_model(data, folder, small.SIZES)
    with pytest.raises(InputError, match="no such data file"):
        init_model(tmp_path / "none.jsonl", tmp_path / "new", small.SIZES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_resolving_names(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(model)) == model.resolve()
    monkeypatch.chdir(model.parent)
    assert resolve_model(model.name) == model.resolve()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").touch()
    for name, message in (
        ("./nothing", "no such model folder"),
        ("nothing", "no such model folder"),
        ("a/b/c", "no such model folder"),
        ("motley/no-such-model", "the hub cannot be reached|no such model"),
        (str(tmp_path / "file"), "is a file"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            resolve_model(name)
        assert "\n" not in str(caught.value)
