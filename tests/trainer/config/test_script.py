"""A script as it is read: its functions and imports are found without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.script_run import SOURCE
from trainer.config.script import read_script
from trainer.system.errors import InputError, RefusedError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCE.replace("import torch", "import torch oops", 1), "train.py:2: the script: Syntax"),
        ("return", "train.py:1: the script: SyntaxError"),
        ("x = '\0'", "train.py: the script: "),
        ("é".encode("latin-1"), "the script: SyntaxError"),
        ("(" * 1000, "the script: "),
        (SOURCE.replace("def loss", "def lost"), "train.py: the script: has no function loss;"),
    ],
)
def test_one_that_cannot_run_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as raised:
        read_script(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_functions_may_come_from_another_module(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    for text in ("from mine import model, dataset, loss", "from mine import *", "import mine\n"):
        path.write_text(text)
        if "from" in text:
            assert read_script(path).imports == ["mine"]
        else:
            with pytest.raises(InputError, match="has no function model"):
                read_script(path)


def test_what_it_imports_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import a.b as x, c\nfrom d.e import f\nfrom . import sibling\n"
        "try:\n    import faster\nexcept ImportError:\n    faster = None\n"
        "def model():\n    import g\ndef dataset(split): pass\nloss = print\n"
        "def draw():\n    import matplotlib\n"
    )
    assert read_script(path).imports == ["a", "c", "d", "g"]


def test_another_script_than_the_start_named_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    digest = read_script(path).digest
    assert read_script(path, digest).digest == digest
    path.write_text(SOURCE + "#")
    with pytest.raises(RefusedError, match="is not the script that the run was started with"):
        read_script(path, digest)
