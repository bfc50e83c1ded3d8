"""`launch plan --distill`: engines, hours, bytes, who waits, and one line for every mistake."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import run
from tests.project.command_blocks import ROOT, command_block
from tests.trainer.small_teacher import teach, wish, write_corpus, write_teacher
from trainer.distill.logits.dataset import LogitsFolder

TEACHER = ["plan", "--distill", "--shape", "qwen3-next-80b-a3b"]
BOX = ["--cluster", "1xCPU8-300GB"]
WITH_CARD = ["--cluster", "1xRTX4090; 1xCPU8-300GB, 1gbit"]


def tree_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_published_tokens_a_second_are_published_hours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """45.7 tokens/s of prefill on 8 threads: 61 hours for 10 million tokens."""
    (command,) = command_block("docs/planning.md", "A distillation").commands
    assert run(shlex.split(command)[1:]) == 0
    shown = capsys.readouterr().out
    assert shown in (ROOT / "docs/planning.md").read_text()
    assert "79.7 billion parameters, 3.87 billion active; scores 10 million tokens" in shown
    assert "torch bfloat16 on CPU, 8 cores: 60.8 hours at 45.7 tokens/s, given" in shown
    assert "In the shared folder: 2.6 GiB, 27" in shown
    assert shown.splitlines()[-1].endswith(
        "--set teacher.engine=torch --set teacher.dtype=bfloat16"
    )


def test_without_a_rate_it_is_computed_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    tree = tree_of(capsys, *TEACHER, *BOX, "--tokens", "10M")
    refused = {one["engine"]: one["refusal"] for one in tree["options"] if one["refusal"]}
    assert refused.keys() == {"openvino"}
    assert tree["schema"] == "motley.distillation/1"
    picked = tree["options"][tree["recommended"]]
    assert (picked["engine"], picked["weights"], picked["fits"]) == ("torch", "bfloat16", "yes")
    assert picked["rate_source"] == "computed"
    assert tree["seconds"] == picked["seconds"] == pytest.approx(1e7 / picked["tokens_per_second"])
    assert (tree["sequence_length"], tree["student"]) == (1024, None)
    assert tree["logits"]["bytes"] == pytest.approx(1e7 * tree["logits"]["bytes_per_token"])


def test_the_slower_one_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    student = ("--student", "albor-350m", "--tokens", "10M")
    assert run([*TEACHER, *WITH_CARD, *student]) == 0
    waits = r"The student albor-350m on RTX4090 learns .*, and waits for the teachers \d+% of"
    assert re.search(waits, capsys.readouterr().out)
    tree = tree_of(capsys, *TEACHER, *WITH_CARD, *student)
    assert tree["seconds"] == pytest.approx(tree["options"][tree["recommended"]]["seconds"])
    assert run([*TEACHER, *WITH_CARD, *student, "--rate", "1e9"]) == 0
    assert "never waits: the teachers are faster" in capsys.readouterr().out
    tree = tree_of(capsys, *TEACHER, *WITH_CARD, *student, "--rate", "1e9")
    assert tree["seconds"] == pytest.approx(tree["student"]["seconds"])
    assert run([*TEACHER, *WITH_CARD, "--student", "70b"]) == 4
    shown = capsys.readouterr()
    assert "are available: use a smaller one" in shown.out
    assert "next:" not in shown.out
    assert shown.err == "launch: the student does not fit on its device\n"
    assert run([*TEACHER, *WITH_CARD, "--student", "70b", "--json"]) == 4
    tree, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    assert (tree["student"]["fits"], tree["seconds"]) == (False, None)


def test_a_teacher_that_does_not_fit_is_refused_with_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dense = ["plan", "--distill", "--shape", "70b"]
    assert run([*dense, "--cluster", "1xCPU8-32GB"]) == 0
    shown = capsys.readouterr().out
    read = (
        r"torch bfloat16 on CPU, 8 cores: .* with \d+ of 80 layers resident, \d+ streamed from the"
    )
    assert re.search(read, shown)
    assert re.search(r"torch bfloat16 on CPU, 8 cores: [\d,]{5,} hours", shown)
    assert run([*dense, "--cluster", "1xRTX4090"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"torch +nf4 +cuda +<- .* streamed ", shown)
    assert "--set teacher.engine=torch --set teacher.quantization=nf4 --set teacher." in shown
    assert run([*dense, "--cluster", "1x12GB"]) == 4
    shown = capsys.readouterr()
    assert "No engine fits: the least is torch nf4 on cuda, with 12" in shown.out
    assert shown.err == "launch: no engine fits this teacher on these hosts\n"
    assert run([*dense, "--cluster", "1xCPU8-2GB"]) == 0
    assert "each forward reads the weights from their file" in capsys.readouterr().out
    assert run([*dense, "--cluster", "1xCPU8-1GB"]) == 4
    assert re.search(r"with \d\.\d GiB of 0\.9 there; 37\.\d to read", capsys.readouterr().out)


def test_the_next_command_starts_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ("--cluster", "1xCPU2-64GB; 1xCPU32-64GB; 1xRTX4090, 1gbit")
    kept = ("--top-k", "32", "--length", "4096")
    assert run(["plan", "--distill", "--shape", "8b", *hosts, *kept]) == 0
    shown = capsys.readouterr().out
    assert "torch bfloat16 on CPU, 32 cores:" in shown
    assert shown.splitlines()[-1].split(" --set ")[1:] == [
        "teacher.engine=torch",
        "teacher.dtype=bfloat16",
        "teacher.processes=1",
        "teacher.top_k=32",
        "teacher.max_seq_len=4096",
    ]
    assert run(["plan", "--distill", "--shape", "8b", *BOX, "--scheme", "sampled"]) == 0
    assert capsys.readouterr().out.endswith("--set teacher.scheme=sampled\n")


def test_a_teacher_may_compute_on_vulkan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--distill", "--shape", "qwen3-32b", "--cluster"]
    assert run([*asked, "W5700X 128GB; CPU8-300GB, 1gbit"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"wgpu +bfloat16 +wgpu +<- .* streamed ", shown)
    read = r"wgpu bfloat16 on W5700X: .* with \d+ of 64 layers resident, \d+ streamed from memory"
    assert re.search(read, shown)
    assert shown.splitlines()[-1].split(" --set ")[1:] == [
        "teacher.engine=wgpu",
        "teacher.dtype=bfloat16",
        "teacher.backend=wgpu",
    ]
    assert run([*TEACHER, "--cluster", "RTX4090 64GB; W5700X 128GB, 1gbit"]) == 0
    assert "wgpu float32: refuses a mixture of experts, which its" in capsys.readouterr().out


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and logits whose teacher has measured its rate."""
    folder = tmp_path_factory.mktemp("taught")
    corpus = write_corpus(folder / "texts.jsonl")
    model = write_teacher(folder / "model", corpus)
    teach(wish(model, corpus, folder / "logits"), name="near")
    return model, folder / "logits"


def test_a_folder_of_logits_gives_its_teachers_rate_and_bytes(
    taught: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, logits = taught
    asked = ("plan", "--distill", "--model", str(model), *BOX, "--rate", str(logits))
    assert not tree_of(capsys, *asked)["logits"]["measured"], "of top-8, not of top-64"
    tree = tree_of(capsys, *asked, "--top-k", "8")
    picked = tree["options"][tree["recommended"]]
    beat = json.loads((logits / "teachers" / "near.json").read_bytes())
    assert beat["device"] == "cpu"
    assert (picked["engine"], picked["weights"], picked["rate_source"]) == (
        "torch",
        "float32",
        "measured",
    )
    assert picked["tokens_per_second"] == pytest.approx(beat["tokens_per_second"])
    described = LogitsFolder(logits).description
    size = sum(path.stat().st_size for path in logits.glob("shard-*/logits.parquet"))
    assert tree["logits"]["measured"]
    assert tree["logits"]["bytes_per_token"] == pytest.approx(size / described.tokens)


def test_the_hosts_of_an_inventory_are_asked(
    taught: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one it is this machine, which teaches and learns."""
    model, logits = taught
    asked = ("plan", "--distill", "--model", str(model), "--student", str(model))
    tree = tree_of(capsys, *asked, "--rate", str(logits))
    assert tree["options"][tree["recommended"]]["rate_source"] == "measured"
    assert tree["student"]["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TEACHER, *BOX, "--rate", "0"], "--rate 0: give tokens a second, or a folder"),
        ([*TEACHER, *BOX, "--rate", "5", "--rate", "6"], "--rate 6: give one number"),
        ([*TEACHER, "--cluster", "1xM2Ultra-192G"], "can compute on CUDA or a processor; there is"),
        ([*TEACHER, *BOX, "--rate", "nowhere"], "--rate nowhere: no folder of logits in which"),
        ([*TEACHER, *BOX, "--student", "absent/"], "no model folder absent/"),
        ([*TEACHER, *BOX, "--explain", "ddp"], "--explain cannot be combined with --distill"),
        ([*TEACHER, *BOX, "--method", "full"], "--method cannot be combined with --distill"),
        (["plan", "--shape", "7b", *BOX, "--rate", "3"], "--rate needs --distill"),
        (["plan", "--shape", "7b", *BOX, "--scheme", "full"], "--scheme needs --distill"),
        ([*TEACHER, "--cluster", ""], "--cluster: cannot read ''"),
        ([*TEACHER, "--cluster", "1xCPU0-3GB"], "unknown device CPU0-3GB"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_rate_of_another_teacher_is_refused(
    taught: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*TEACHER, *BOX, "--rate", str(taught[1])]) == 2
    assert "it was measured with a teacher of 278 tokens, and" in capsys.readouterr().err
