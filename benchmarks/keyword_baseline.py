"""The accuracy of a bag of keywords on the shell-safety data: a model's baseline.

Two logistic regressions over counts, trained on one file and scored on others: `words` counts
words alone, `symbols` counts every word and every punctuation mark. Neither sees order or place.

    python benchmarks/keyword_baseline.py demo/data/train.jsonl demo/data/validation.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, matthews_corrcoef
from sklearn.pipeline import make_pipeline

from trainer.data.samples import read_samples
from trainer.data.shell_safety.family import CLASSES

TOKENS = {"words": r"\w\w+", "symbols": r"\w+|[^\w\s]"}


def measure(train: Path, others: list[Path], num_classes: int) -> dict[str, object]:
    """Return accuracy and MCC of both baselines on each file."""
    samples = read_samples(train, "classify", num_classes)
    report: dict[str, object] = {"train": str(train), "count": len(samples)}
    for kind, pattern in TOKENS.items():
        model = make_pipeline(
            CountVectorizer(token_pattern=pattern, lowercase=False),
            LogisticRegression(max_iter=3000),
        )
        model.fit([sample.text for sample in samples], [sample.label for sample in samples])
        scores: dict[str, object] = {}
        for path in others:
            held_out = read_samples(path, "classify", num_classes)
            truth = [sample.label for sample in held_out]
            guess = model.predict([sample.text for sample in held_out])
            scores[str(path)] = {
                "accuracy": round(float(accuracy_score(truth, guess)), 4),
                "mcc": round(float(matthews_corrcoef(truth, guess)), 4),
                "count": len(truth),
            }
        report[kind] = scores
    return report


def main() -> None:
    """Parse, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("train", type=Path)
    parser.add_argument("others", type=Path, nargs="+", help="files to score: validation, foreign")
    parser.add_argument("--num-classes", type=int, default=len(CLASSES))
    args = parser.parse_args()
    print(json.dumps(measure(args.train, args.others, args.num_classes), indent=2))


if __name__ == "__main__":
    main()
