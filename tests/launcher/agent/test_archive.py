"""The agent's code in one piece holds what it imports, and nothing that it can do without."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from launcher.agent.archive import agent_archive


def test_it_holds_every_module_that_its_own_import_needs(tmp_path: Path) -> None:
    (tmp_path / "agent.zip").write_bytes(agent_archive())
    code = (
        "import sys, launcher.agent.server;"
        "print(*(m.__spec__.origin for n, m in sys.modules.items()"
        " if n.startswith(('launcher', 'trainer'))))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "agent.zip")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported = {Path(file).relative_to(tmp_path / "agent.zip") for file in done.stdout.split()}
    packed = zipfile.ZipFile(io.BytesIO(agent_archive())).namelist()
    assert imported == set(map(Path, packed))
