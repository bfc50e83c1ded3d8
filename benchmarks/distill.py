"""Distillation: bytes a token, the cost of scoring, engines, and a student's answers.

    python benchmarks/distill.py bytes [--tokens 2048]
    python benchmarks/distill.py scoring [--hidden-size 2048] [--tokens 512] [--repeats 3]
    python benchmarks/distill.py engines --model MODEL [--only NAME ...] [--tokens 1024]
    python benchmarks/distill.py generate --model DIR [--tokens 64] [--backend cuda]
    python benchmarks/distill.py kv [--gpu 0]

Prints ratios and writes benchmarks/results/distill-PART.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rig import answers
from rig.kv import kv
from rig.report import Ratio, Report
from rig.spectrum import WINDOW, describe, synthetic

from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.scores import Scheme
from trainer.distill.teacher.admission import admit_engine
from trainer.distill.teacher.engines import Engine
from trainer.distill.teacher.gguf_engine import GgufEngine
from trainer.distill.teacher.openvino_engine import OpenVinoEngine
from trainer.distill.teacher.scoring import Teacher
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.distill.teacher.windows import UnscoredWindow
from trainer.model.files import resolve_model
from trainer.model.gguf.source import find_source

VOCAB_SIZE = 151_936
"""Of Qwen3."""
TOPK = Scheme(kind="topk", top_k=64, tail_samples=8)
ROOT = Path(__file__).resolve().parents[1]
MOST_NATS = 0.01
"""That an engine may be from transformers in fp32."""


def main() -> int:
    """Measure one part, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, settings in {
        "bytes": {"tokens": 2048},
        "scoring": {"tokens": 512, "hidden_size": 2048, "repeats": 3},
        "engines": {"tokens": 1024, "repeats": 2},
        "generate": {"tokens": 64},
        "kv": {},
    }.items():
        part = parts.add_parser(name)
        for setting, default in settings.items():
            part.add_argument(f"--{setting.replace('_', '-')}", type=int, default=default)
    parts.choices["engines"].add_argument("--model", required=True)
    parts.choices["engines"].add_argument("--only", nargs="+", metavar="NAME")
    parts.choices["generate"].add_argument("--model", type=Path, required=True)
    parts.choices["generate"].add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parts.choices["kv"].add_argument("--gpu", default="", help="index, PCI address or name")
    arguments = parser.parse_args()
    report = Report(f"distill-{arguments.part}")
    measure = {
        "bytes": measure_bytes,
        "scoring": scoring,
        "engines": engines,
        "generate": answers.generate,
        "kv": kv,
    }
    measure[arguments.part](report, arguments)
    return report.write()


def measure_bytes(report: Report, arguments: argparse.Namespace) -> None:
    """Bytes a token of whole shards against ids of 18 bits and fp16 values side by side."""
    small = 4096
    plain = {  # scheme, vocabulary, bytes a token without any coding
        "top 128": (replace(TOPK, top_k=128, tail_samples=0), VOCAB_SIZE, 544),
        "top 64": (replace(TOPK, tail_samples=0), VOCAB_SIZE, 272),
        "top 64 and 8 draws": (TOPK, VOCAB_SIZE, 306),
        "50 draws": (Scheme(kind="sampled", samples=50), VOCAB_SIZE, 38),
        "all of 151,936": (Scheme(kind="full"), VOCAB_SIZE, 2 * VOCAB_SIZE),
        "all of 4,096": (Scheme(kind="full"), small, 2 * small),
    }
    for name, (scheme, size, usual) in plain.items():
        tokens = min(arguments.tokens, WINDOW) if scheme.kind == "full" else arguments.tokens
        windows = synthetic(scheme, tokens, size)
        entries = sum(int(window.scores.offsets[-1]) for window in windows) / tokens
        for values in ("float16", "float32"):
            with tempfile.TemporaryDirectory() as scratch:
                folder = LogitsFolder(Path(scratch))
                folder.write_description(describe(scheme, tokens, size, values=values))
                written = folder.write_shard(0, windows)
                found = (written / "logits.parquet").stat().st_size / tokens
            report.add(
                Ratio(f"{name}, {values}, {found:.1f} bytes a token", found / usual, str(usual)),
                tokens=tokens,
                bytes_per_token=found,
                entries_per_token=entries,
            )


def scoring(report: Report, arguments: argparse.Namespace) -> None:
    """The cost of scoring and writing over a forward that ends with logits.

    Their cost at a position depends on the vocabulary alone, so the ratio falls with the teacher's
    size: hidden size 1024 is Qwen3-0.6B, 2048 is Qwen3-1.7B.
    """
    hidden = arguments.hidden_size
    model = {**_QWEN3, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    with tempfile.TemporaryDirectory() as scratch:
        teacher_model = random_model(Path(scratch) / "teacher", model)
        ids = np.arange(VOCAB_SIZE, dtype=np.int32)
        teacher = Teacher(teacher_model, TOPK, ids, seed=0, batch_tokens=arguments.tokens)
        shards, windows = 3, arguments.tokens // WINDOW
        description = describe(TOPK, arguments.tokens, VOCAB_SIZE, shards=shards)
        draw = np.random.default_rng(0)
        pieces = [
            [
                UnscoredWindow(
                    shard * windows + row, 0, draw.integers(VOCAB_SIZE, size=WINDOW, dtype="i4")
                )
                for row in range(windows)
            ]
            for shard in range(shards)
        ]

        def bare() -> None:
            for batch in pieces:
                for _ in teacher_model.iterate_logits([piece.tokens for piece in batch]):
                    pass

        def scored() -> None:
            for batch in pieces:
                teacher.score_pieces(batch)

        def written() -> None:
            with tempfile.TemporaryDirectory(dir=scratch) as place:
                folder = LogitsFolder(Path(place))
                folder.write_description(description)
                with ThreadPoolExecutor(1) as writer:  # as in `trainer.distill.teacher.run`
                    shards_written = [
                        writer.submit(folder.write_shard, number, teacher.score_pieces(batch))
                        for number, batch in enumerate(pieces)
                    ]
                    for each in shards_written:
                        each.result()

        times = interleaved({"bare": bare, "scored": scored, "written": written}, arguments.repeats)
    body, head = parameters(model)
    figures = {
        "tokens": shards * arguments.tokens,
        "hidden_size": hidden,
        "body_parameters": body,
        "head_parameters": head,
    }
    usual = "one that ends with logits"
    compare(
        report,
        "a forward with scoring and writing",
        times["written"],
        usual,
        times["bare"],
        target=1.05,
        **figures,
    )
    compare(report, "a forward with scoring", times["scored"], usual, times["bare"], **figures)
    report.add(Ratio("the head's share of the forward", head / (body + head), "its products"))


def engines(report: Report, arguments: argparse.Namespace) -> None:
    """Each engine on one thread: scored tokens a CPU second, and its KL to transformers in fp32.

    The texts are this project's documents, in windows of 256 tokens.
    """
    torch.set_num_threads(1)
    model = resolve_model(arguments.model)
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = np.array(load_tokenizer(model).encode(text[: 8 * arguments.tokens]).ids, np.int32)
    tokens = [ids[first : first + WINDOW] for first in range(0, arguments.tokens, WINDOW)]
    openers: dict[str, Callable[[], Engine]] = {
        "transformers fp32": lambda: TorchEngine(model, torch.float32, published=True),
        "transformers bf16": lambda: TorchEngine(model, torch.bfloat16, published=True),
        "torch bf16": lambda: TorchEngine(model, torch.bfloat16),
        "openvino int8": lambda: OpenVinoEngine(model, "bfloat16", threads=1),
    }
    if (source := find_source(model)) is not None:
        openers["gguf"] = lambda: GgufEngine(source, threads=1)
    known = {name: openers[name]() for name in arguments.only or openers}
    own = np.arange(next(iter(known.values())).vocab_size, dtype=np.int32)
    pieces = [UnscoredWindow(number, 0, window) for number, window in enumerate(tokens)]
    teachers = {name: Teacher(each, TOPK, own, 0, 1024) for name, each in known.items()}
    times = interleaved(
        {name: partial(each.score_pieces, pieces) for name, each in teachers.items()},
        arguments.repeats,
    )
    distances = {name: admit_engine(each, name, model, tokens[:2]) for name, each in known.items()}
    speed = {name: arguments.tokens / min(each.processor) for name, each in times.items()}
    for name, value in speed.items():
        print(f"{name}: {value:,.0f} tokens per CPU second, {distances[name]:.2g} nats to fp32")
    targets = {"transformers bf16": 1 / 1.25, "transformers fp32": 1 / 2.3}
    for name, against in product(("openvino int8", "gguf"), targets):
        if {name, against} <= speed.keys():
            target = targets[against] if name == "openvino int8" else None
            report.add(
                Ratio(name, speed[against] / speed[name], against, target=target),
                tokens_per_cpu_second=speed,
                kl=distances,
            )
    for name in {"openvino int8", "gguf"} & speed.keys():
        kl = distances[name]
        assert kl is not None, "there are positions"
        report.add(Ratio(f"{name}: the KL", kl / MOST_NATS, f"{MOST_NATS} nats", target=1.0))


_QWEN3: dict[str, Any] = {  # shared by Qwen3-0.6B and 1.7B
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def random_model(folder: Path, settings: dict[str, Any]) -> TorchEngine:
    """Return a teacher with random weights, in bfloat16."""
    config = transformers.AutoConfig.for_model(**settings)
    transformers.logging.disable_progress_bar()
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    return TorchEngine(folder, torch.bfloat16)


def parameters(model: dict[str, Any]) -> tuple[int, int]:
    """Return the number of weights that multiply one token: in the layers, in the head."""
    hidden, heads = model["hidden_size"], model["head_dim"]
    attention = 2 * (model["num_attention_heads"] + model["num_key_value_heads"]) * heads
    layer = hidden * (attention + 3 * model["intermediate_size"])
    return model["num_hidden_layers"] * layer, hidden * model["vocab_size"]


@dataclass(frozen=True)
class Times:
    """Seconds of every run of one candidate; processor seconds are of all threads together."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def interleaved(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Return the times of each, interleaved, so that other load affects all alike."""
    times = {name: Times() for name in candidates}
    for repeat in range(repeats + 1):
        for name, run in candidates.items():
            began = time.perf_counter(), time.process_time()
            run()
            if repeat:  # the first one warms up
                times[name].wall.append(time.perf_counter() - began[0])
                times[name].processor.append(time.process_time() - began[1])
    return times


def compare(
    report: Report,
    name: str,
    ours: Times,
    against: str,
    theirs: Times,
    target: float | None = None,
    **more: Any,
) -> None:
    """Report wall time against a target, and CPU time, which other processes disturb less."""
    figures = {"ours": asdict(ours), "theirs": asdict(theirs), **more}
    wall, processor = (
        float(np.median(np.divide(getattr(ours, kind), getattr(theirs, kind))))
        for kind in ("wall", "processor")
    )
    report.add(Ratio(name, wall, against, target=target), **figures)
    report.add(Ratio(f"{name}, in processor time", processor, against))


if __name__ == "__main__":
    raise SystemExit(main())
