"""A published model and published data, from packages of pip, npm and Debian."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.real.data import Described, described, mails
from tests.real.packages import SMOLLM2, Package, PackageUnavailableError, model_file
from trainer.model.files import resolve_model


def folder_of(package: Package) -> Path:
    """Return the files of a package; the test skips where they cannot be had."""
    try:
        return package.folder()
    except PackageUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return SmolLM2-135M-Instruct as a GGUF file."""
    folder_of(SMOLLM2)
    return model_file()


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Path:
    """Return the same as a model folder, converted by the product."""
    return resolve_model(str(smollm2_gguf))


@pytest.fixture(scope="session")
def first_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model without all layers but the first three: its vocabulary, a third its size."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("first-layers")
    for file in smollm2.glob("*.json*"):
        shutil.copy(file, folder)
    for file in smollm2.glob("*.jinja"):
        shutil.copy(file, folder)
    config = json.loads((smollm2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    kept = {
        name: tensor
        for name, tensor in load_file(smollm2 / "model.safetensors").items()
        if not (found := re.search(r"layers\.(\d+)\.", name)) or int(found[1]) < 3
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def sections() -> list[Described]:
    """Return 440 packages of ten sections, mixed."""
    try:
        return described(440)
    except PackageUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def subjects() -> list[dict[str, object]]:
    """Return 400 subjects of mails, every other one spam."""
    try:
        return mails(400)
    except PackageUnavailableError as error:
        pytest.skip(str(error))
