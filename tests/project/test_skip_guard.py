"""The guard of the root conftest: in CI a skip needs a reason that the list expects."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
XDIST = ["-p", "xdist", "-n1"]

UNEXPECTED = "import pytest\n\ndef test_one():\n    pytest.skip('not today')\n"
EXPECTED = "import pytest\n\ndef test_one():\n    pytest.skip('needs root: mounts a tmpfs')\n"
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_module')\n\ndef test_one():\n    pass\n"
PASSING = "\ndef test_two():\n    pass\n"


@pytest.mark.parametrize(
    ("body", "strict", "arguments", "failed"),
    [
        (UNEXPECTED, {"CI": "true"}, [], True),
        (UNEXPECTED, {"MOTLEY_STRICT_SKIPS": "1"}, [], True),
        (UNEXPECTED, {"CI": "true"}, XDIST, True),
        (UNEXPECTED, {}, [], False),
        (WHOLE_FILE, {"CI": "true"}, [], True),
        (EXPECTED, {"CI": "true"}, [], False),
    ],
)
def test_only_expected_reasons_pass_in_ci(
    tmp_path: Path, body: str, strict: dict[str, str], arguments: list[str], failed: bool
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(body)
    (tmp_path / "test_passing.py").write_text(PASSING)
    quiet = {k: v for k, v in os.environ.items() if k not in ("CI", "MOTLEY_STRICT_SKIPS")}
    quiet = {k: v for k, v in quiet.items() if not k.startswith(("PYTEST_", "COV_"))}
    quiet["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    result = subprocess.run(
        [*PYTEST, f"--basetemp={tmp_path}/kept", *arguments, str(tmp_path)],
        cwd=tmp_path,
        env=quiet | strict,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == (1 if failed else 0), result.stdout + result.stderr
    assert ("does not expect" in result.stdout) == failed
