"""A published model and published data, from packages of pip, npm and Debian."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.data import Described, described, mails
from tests.real.packages import SMOLLM2, Package, PackageUnavailableError


def folder_of(package: Package) -> Path:
    """Return the files of a package; the test skips where they cannot be had."""
    try:
        return package.folder()
    except PackageUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return SmolLM2-135M-Instruct as a GGUF file."""
    (file,) = folder_of(SMOLLM2).glob("*/*.gguf")
    return file


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
