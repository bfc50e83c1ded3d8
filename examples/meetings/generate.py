"""Write meetings with their minutes as conversations: train.jsonl, validation.jsonl.

    python examples/meetings/generate.py -o data [--count 12000] [--validation-count 600] [--seed 0]
    python examples/meetings/generate.py -o data --ami DIR

Equal seeds give equal bytes. --ami converts the unpacked manual annotations of the AMI Meeting
Corpus instead, by its own parts, also test.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meetings.ami import read_corpus
from meetings.generator import generate

from trainer.data.corpus import write_corpus
from trainer.system.errors import InputError


def main() -> None:
    """Generate or convert, and print what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--validation-count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ami", type=Path, metavar="DIR")
    options = parser.parse_args()
    try:
        if options.ami is not None:
            parts = read_corpus(options.ami)
        else:
            parts = {
                "train": list(generate("train", options.count, options.seed)),
                "validation": list(generate("validation", options.validation_count, options.seed)),
            }
        lines = {name: (meeting.as_json() for meeting in found) for name, found in parts.items()}
        folder = write_corpus(options.output, lines)
    except InputError as error:
        sys.exit(f"generate: {error}")
    print(f"{folder}: " + ", ".join(f"{len(found)} {name}" for name, found in parts.items()))


if __name__ == "__main__":
    main()
