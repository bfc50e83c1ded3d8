"""The demo's report: is it good, is it equal everywhere, did every sample count once?

Usage: python scripts/demo_report.py demo
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

from trainer.tracking.metrics import read_metrics

BIN = Path(sys.executable).parent


def start(*command: str | Path) -> subprocess.Popen[bytes]:
    """Start a program that prints one JSON object."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def printed(process: subprocess.Popen[bytes]) -> dict:
    """Wait for a program's JSON object."""
    output, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


def peft_opens(adapter: Path) -> str:
    """Open the adapter with Hugging Face's own library."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # an optional kernel is not here
    import peft
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = peft.PeftConfig.from_pretrained(str(adapter))
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(settings.base_model_name_or_path), num_labels=5
    )
    model = peft.PeftModel.from_pretrained(base, str(adapter))
    trainable = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return f"PeftModel.from_pretrained opens it ({trainable:,} LoRA weights)"


def samples_of_epochs(metrics: list[dict]) -> str:
    """Count from the ledger how often each sample of each epoch was used."""
    used: dict[int, Counter[int]] = {}
    for record in metrics:
        if record["kind"] == "step":
            for _, start, stop in record["sample_ranges"]:
                used.setdefault(record["epoch"], Counter()).update(range(start, stop))
    wrong = sum(count != 1 for epoch in used.values() for count in epoch.values())
    gaps = sum(set(epoch) != set(range(max(epoch) + 1)) for epoch in used.values())
    total = sum(len(epoch) for epoch in used.values())
    assert not wrong, f"{wrong} samples did not count exactly once"
    assert not gaps, f"{gaps} epochs have gaps"
    return f"{total:,} samples in {len(used)} epochs, each exactly once"


def main() -> None:
    """Print the report."""
    warnings.simplefilter("ignore")
    demo = Path(sys.argv[1])
    train, validation = demo / "data/train.jsonl", demo / "data/validation.jsonl"
    output = demo / "output"
    metrics = read_metrics(output / "metrics.jsonl")
    steps = [record for record in metrics if record["kind"] == "step"]
    proofs = [record for record in metrics if record.get("event") == "verified"]
    assert proofs, "no proof of equal weights"
    # A bag of words and symbols is what a model must beat to have understood anything.
    baseline = start(sys.executable, "benchmarks/keyword_baseline.py", train, validation)
    scores = start(BIN / "trainer", "evaluate", output, "--data", validation, "--json")
    opened = peft_opens((output / "checkpoints/best").resolve())
    keywords, final = printed(baseline)["symbols"][str(validation)], printed(scores)
    rows = [
        ("keywords alone", f"accuracy {keywords['accuracy']:.3f}  MCC {keywords['mcc']:.3f}"),
        ("this model", f"accuracy {final['accuracy']:.3f}  MCC {final['mcc']:.3f}"),
        ("training", f"{len(steps)} steps, loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}"),
        (
            "equal weights",
            f"{len(proofs)} proofs, last {proofs[-1]['digest'][:16]} on ranks "
            f"{', '.join(map(str, proofs[-1]['ranks']))}",
        ),
        ("the ledger", samples_of_epochs(metrics)),
        ("the adapter", opened),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")


if __name__ == "__main__":
    main()
