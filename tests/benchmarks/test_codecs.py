"""`benchmarks/codecs.py` measures the codecs as a run has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from trainer.config.codec import CODECS


def test_error_feedback_is_measured_of_the_codecs_that_have_it(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/codecs.py", "--elements", "4096", "--repeats", "1"]
    environment = os.environ | {"BENCHMARK_RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1 is a missed target
    names = {
        ratio["name"] for ratio in json.loads((tmp_path / "codecs.json").read_text())["ratios"]
    }
    fed = {name for name, kind in CODECS.items() if kind.needs_feedback}
    assert fed
    ways = {f"{name} {way}" for name in CODECS for way in ("encode", "decode")}
    assert names == ways | {f"{name} encode with error feedback" for name in fed} | {"memcpy"}
