"""What the ranks say, and how they end, when one of them fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.run.distributed.faults import CASES, HOLDER, HOLDER_REFUSED

pytestmark = pytest.mark.cluster
SIGNALLED = -9


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what happened in each case."""
    folder = tmp_path_factory.mktemp("faulty")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.trainer.run.distributed.faulty_ranks", folder],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"},
    )
    assert done.returncode == 0, done.stderr
    cases = {case["case"]: case for case in map(json.loads, done.stdout.splitlines())}
    assert set(cases) == {*CASES, HOLDER, HOLDER_REFUSED}
    for case in cases.values():
        for said in case["said"]:
            assert said.count("\n") <= 1, f"more than a line: {said}"
            assert "Traceback" not in said
    return cases


@pytest.mark.parametrize(("case", "verb"), [("killed", "failed"), ("stopped", "timed out")])
def test_a_rank_that_is_gone_or_hangs_is_named_with_its_host(
    found: dict[str, dict[str, Any]], case: str, verb: str
) -> None:
    assert found[case]["codes"] == [3, SIGNALLED, 3]
    lines = [found[case]["said"][rank] for rank in (0, 2)]
    # The first rank that times out closes its connections, and another's collective may fail then.
    assert any(f": a collective {verb}: " in line for line in lines)
    for rank, line in zip((0, 2), lines, strict=True):
        assert re.match(
            rf"trainer: rank {rank} on host{rank}: a collective [a-z ]+: no heartbeat", line
        )
        assert "no heartbeat from rank 1 on host1 (killed, stopped or cut off)" in line
        assert f"rank {2 - rank} on" not in line, "a rank that lives is not blamed"
    assert found[case]["recorded"] == ["rank-0.json", "rank-2.json"]


def test_the_last_collectives_are_kept(found: dict[str, dict[str, Any]]) -> None:
    line = found["stopped"]["said"][0]
    path = Path(line.rpartition(" are in ")[2].strip())
    entries = json.loads(path.read_text())["entries"]
    assert [entry["profiling_name"] for entry in entries][-3:] == ["gloo:all_reduce"] * 3


def test_the_rank_that_holds_the_store_is_named_when_it_hangs(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found[HOLDER]["codes"] == [SIGNALLED, 3, 3]
    for line in found[HOLDER]["said"][1:]:
        assert "rank 0 on host0, which serves the store, does not answer" in line


def test_the_rank_that_holds_the_store_stays_until_the_others_know_why_it_fails(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found[HOLDER_REFUSED]["codes"] == [4, 4, 4]
    for line in found[HOLDER_REFUSED]["said"][1:]:
        assert "rank 0 on host0 has failed: the disk is another's. Look" in line


@pytest.mark.parametrize(
    ("case", "code", "others", "reason"),
    [("refused", 4, 4, "the disk is another's"), ("defect", 1, 3, "KeyError: 'nothing'")],
)
def test_others_say_why_a_rank_failed(
    found: dict[str, dict[str, Any]], case: str, code: int, others: int, reason: str
) -> None:
    assert found[case]["codes"] == [others, code, others]
    for rank in (0, 2):
        assert f"rank 1 on host1 has failed: {reason}. Look" in found[case]["said"][rank]
