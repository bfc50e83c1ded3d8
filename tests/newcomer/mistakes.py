"""The mistakes, as commands in a folder that has a small model and data."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.corpus import write_shell_safety
from trainer.init_model import ModelSizes, init_model
from trainer.system.timestamp import leading_timestamp

_LINES = 11
"""Of a file with several bad lines the first ten are named, each on a line."""
BIN = Path(sys.executable).parent
SIZES = ModelSizes(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    vocab_size=300,
    max_position_embeddings=512,
)
FILE = {"MOTLEY_STATE_DIR": "text.jsonl"}
HOME = {"MOTLEY_STATE_DIR": "", "XDG_STATE_HOME": "", "HOME": "text.jsonl"}
TASK = " --task causal-lm --gpu-backend cpu --threads 1 -o out"
TRAIN = "trainer finetune model --data {}" + TASK


@dataclass(frozen=True)
class Mistake:
    """A command line, and what its answer has to say."""

    name: str
    command: str
    says: tuple[str, ...]
    """Words that the message contains."""
    code: int = 2
    environment: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Answer:
    """What came of a mistake."""

    code: int
    seconds: float
    """Of the processor."""
    message: str
    """The line on stderr that begins with the program's name, else the last one."""
    is_short: bool
    """Neither a traceback nor more than a few lines."""


MISTAKES = (
    Mistake("no arguments to finetune", "trainer finetune", ("MODEL",)),
    Mistake("a command mistyped", "trainer finetun model", ("finetune",)),
    Mistake("a command of launch mistyped", "launch statsu", ("status",)),
    Mistake("no such file", TRAIN.format("nothing.jsonl"), ("nothing.jsonl",)),
    Mistake("a folder as data", TRAIN.format("folder"), ("folder",)),
    Mistake("empty data", TRAIN.format("empty.jsonl"), ("empty.jsonl",)),
    Mistake("CSV of other columns", TRAIN.format("data.csv"), ("data.csv", "body")),
    Mistake("a torn JSON array", TRAIN.format("array.json"), ("array.json",)),
    Mistake("a torn gzip", TRAIN.format("data.jsonl.gz"), ("data.jsonl.gz",)),
    Mistake("a malformed line", TRAIN.format("torn.jsonl"), ("torn.jsonl:2:",)),
    Mistake("a key twice in a line", TRAIN.format("twice.jsonl"), ("twice.jsonl:1", "twice")),
    Mistake("an unknown shape", TRAIN.format("odd.jsonl"), ("odd.jsonl:1", "text")),
    Mistake("two shapes at once", TRAIN.format("both.jsonl"), ("both.jsonl:1",)),
    Mistake(
        "a label beyond the classes",
        "trainer finetune model --data train.jsonl --task classify --num-classes 2 -o out",
        ("label",),
    ),
    Mistake("no such model", "trainer finetune nowhere --data train.jsonl" + TASK, ("nowhere",)),
    Mistake("a model of pickles", "trainer finetune bin --data text.jsonl" + TASK, ("bin",)),
    Mistake("GGUF", "trainer finetune gguf --data text.jsonl" + TASK, ("GGUF",)),
    Mistake(
        "an adapter as model",
        "trainer finetune adapter --data text.jsonl" + TASK,
        ("adapter", "merge"),
    ),
    Mistake("no such GPU backend", TRAIN.format("text.jsonl") + " --gpu-backend rocm", ("cuda",)),
    Mistake(
        "CUDA where there is none",
        TRAIN.format("text.jsonl").replace("cpu", "cuda"),
        ("cuda", "is not available"),
    ),
    Mistake(
        "another trainer's flag", TRAIN.format("text.jsonl") + " --lr 1e-4", ("--learning-rate",)
    ),
    Mistake(
        "a setting mistyped",
        TRAIN.format("text.jsonl") + " --set training.epoch=2",
        ("training.epoch", "epochs"),
    ),
    Mistake(
        "all-linear",
        TRAIN.format("text.jsonl") + " --set lora.target_modules=all-linear",
        ("target_modules",),
    ),
    Mistake(
        "longer than the model's positions",
        TRAIN.format("text.jsonl") + " --max-seq-len 4096",
        ("512",),
    ),
    Mistake("a preset mistyped", "trainer finetune --config quickstrat", ("quickstart",)),
    Mistake("nothing runs", "launch logs worker-0", ("no run",)),
    Mistake("no nodes", "launch cluster up --nodes ,", ("--nodes names no hosts",)),
    Mistake("a thousand hundred workers", "launch cluster up -n 100000 --dry-run", ("1024",)),
    Mistake("no such inventory", "launch status --inventory nowhere.yml", ("nowhere.yml",)),
    Mistake("a generate without a model", "trainer generate nowhere --prompt x", ("nowhere",)),
    Mistake("a chat without a model", "trainer chat nowhere", ("nowhere",)),
    Mistake("nothing to continue", "trainer generate nowhere", ("--prompt", "--chat", "--data")),
    Mistake("an evaluation of nothing", "trainer evaluate nowhere --data x.jsonl", ("nowhere",)),
    *(
        Mistake(f"{number} as a number", TRAIN.format("text.jsonl") + f" {flag}{number}", says)
        for flag, number, says in (
            ("--learning-rate ", "inf", ("--learning-rate", "not a finite number")),
            ("--learning-rate ", "nan", ("--learning-rate", "not a finite number")),
            ("--learning-rate ", "1e400", ("--learning-rate", "not a finite number")),
            ("--learning-rate ", "fast", ("--learning-rate", "not a number")),
            ("--learning-rate ", "-1e-4", ("optimizer.learning_rate", "greater than 0")),
            ("--epochs ", "1.5", ("--epochs", "not a whole number")),
            ("--set optimizer.weight_decay=", ".inf", ("optimizer.weight_decay", "finite")),
            ("--set exchange.join_deadline=", ".nan", ("exchange.join_deadline", "finite")),
            ("--set training.max_steps=", "yes", ("training.max_steps", "a number", "yes")),
            ("--set training.batch_size=", "on", ("training.batch_size", "a number")),
            ("--set training.seed=", "123456789012345678901", ("training.seed", "at most")),
            ("--set lora.lora_rank=", "100000", ("lora.lora_rank", "32")),
            ("--epochs ", "1000000000000", ("training.epochs", "less than or equal")),
            ("--set exchange.lost_after=", "1e18", ("exchange.lost_after", "less than or equal")),
            ("--threads ", "5000", ("--threads", "this host has")),
        )
    ),
    Mistake("null for an output", TRAIN.format("text.jsonl") + " --set output=null", ("output",)),
    Mistake(
        "a section as a number",
        TRAIN.format("text.jsonl") + " --set training=3",
        ("training", "a mapping of settings", "batch_size"),
    ),
    Mistake("a binary config", "trainer finetune --config model/model.safetensors", ("UTF-8",)),
    Mistake("a folder as config", "trainer finetune --config folder", ("is a folder, not a file",)),
    Mistake("the root as output", TRAIN.format("text.jsonl").replace("out", "/"), ("root",)),
    Mistake(
        "the model as output",
        TRAIN.format("text.jsonl").replace("out", "model"),
        ("contains a model",),
    ),
    *(
        Mistake(
            f"{dash!r}", f"trainer finetune model {dash}data text.jsonl", ("not a hyphen", "--data")
        )
        for dash in ("\u2013", "-\u2013", "\u2014")
    ),
    Mistake("a setting without a name", TRAIN.format("text.jsonl") + " --set =3", ("KEY=VALUE",)),
    Mistake("a new model over all", "trainer init-model --data text.jsonl -o /", ("a new folder",)),
    Mistake("a card of no maker", "launch plan --shape 7b --cluster 8xFOO", ("8GB", "RTX4090")),
    *(
        Mistake(f"{command} with a pipe", f"{command} --model model --data pipe", ("is a pipe",))
        for command in ("launch cluster up", "launch cluster up --dry-run", "launch init run.yaml")
    ),
    *(
        Mistake(f"{words}, of another program", words, says)
        for words, says in (
            ("trainer train model", ("trainer finetune",)),
            ("launch stop", ("launch cluster down",)),
            ("launch ps", ("launch status", "launch runs")),
            ("launch train", ("launch cluster up",)),
            ("launch cluster up run.yaml", ("--config run.yaml",)),
            ("launch cluster up -c run.yaml", ("--config",)),
            ("launch cluster up -f run.yaml", ("--config",)),
            ("launch logs -n 20", ("--tail",)),
            ("launch status -f", ("--watch",)),
            ("launch status watch", ("did you mean: --watch",)),
            ("trainer cache clear", ("did you mean: --clear",)),
            ("launch cluster up --follow", ("--wait",)),
            ("trainer distill teacher model --data text.jsonl -o x", ("--out",)),
            ("trainer finetune model --bf16", ("training.precision=bf16",)),
            ("trainer finetune model --report-to none", ("metrics.jsonl",)),
            ("trainer finetune model --resume_from_checkpoint x", ("the same -o",)),
        )
    ),
    Mistake("a million cards", "launch plan --shape 7b --cluster 1000000xT4", ("65,536",)),
    *(
        Mistake(f"{command}, the state in a file", command, ("text.jsonl", "directory"), 2, FILE)
        for command in ("launch status", "launch runs", "launch cluster down")
    ),
    Mistake("a home that is a file", "launch runs", ("text.jsonl", "directory"), 2, HOME),
)


def prepare(folder: Path) -> None:
    """Write a model and data, right and wrong."""
    write_shell_safety(folder, 40, 10, 0)
    init_model(folder / "train.jsonl", folder / "model", SIZES, 0)
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.dumps({"text": json.loads(line)["input"]}) for line in lines]
    files: dict[str, str | bytes] = {
        "text.jsonl": "\n".join(texts),
        "empty.jsonl": "",
        "data.csv": "body,kind\nls,0\nrm -rf $x,4\n",
        "array.json": f"[{','.join(texts)[:-9]}",
        "data.jsonl.gz": gzip.compress("\n".join(texts).encode())[:-40],
        "torn.jsonl": f"{texts[0]}\n{texts[1][:-3]}\n",
        "twice.jsonl": '{"text": "a", "text": "b"}\n',
        "odd.jsonl": '{"body": "ls"}\n',
        "both.jsonl": '{"text": "ls", "prompt": "a", "completion": "b"}\n',
        "bin/config.json": (folder / "model/config.json").read_text(encoding="utf-8"),
        "bin/pytorch_model.bin": b"PK\x03\x04",
        "gguf/model.gguf": b"GGUF\x03\x00\x00\x00",
        "adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "model", "r": 8}),
        "adapter/adapter_model.safetensors": b"",
    }
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def make(mistake: Mistake, folder: Path, environment: dict[str, Any]) -> Answer:
    """Make a mistake and return what came of it."""
    program, *words = mistake.command.split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [BIN / program, *words],
        cwd=folder,
        env=environment | mistake.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answered(mistake, done, seconds)


def answered(
    mistake: Mistake, done: subprocess.CompletedProcess[str], seconds: float = 0.0
) -> Answer:
    """Return the answer that a command has written."""
    program = mistake.command.split()[0]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = [line for line in lines if leading_timestamp(line) is None]  # not its log
    named = [line for line in said if line.startswith(f"{program}: ")]
    is_short = len(said) <= _LINES and "Traceback" not in done.stderr
    return Answer(done.returncode, seconds, [*named, *said[-1:], ""][0], is_short)


def complaints(mistake: Mistake, answer: Answer) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    if answer.code != mistake.code:
        yield f"exit code {answer.code}, not {mistake.code}"
    if not answer.is_short:
        yield "more than a few lines"
    for word in mistake.says:
        if word.lower() not in answer.message.lower():
            yield f"does not say {word!r}"
