"""The report of `make demo-real`: questions, and the answers before and after, side by side.

Usage: python scripts/demo_real_report.py demo-real
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.tracking.metrics import read_metrics

SHOWN = 12


def lines(path: Path) -> list[dict]:
    """Return a file of JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Print the report."""
    demo = Path(sys.argv[1])
    asked = [row["messages"] for row in lines(demo / "data/validation.jsonl")]
    before, after = (
        [" ".join(row["text"].split()) for row in lines(demo / f"{name}.jsonl")]
        for name in ("before", "after")
    )
    rows = [
        (turns[0]["content"].partition("? ")[2], turns[1]["content"], *answers)
        for turns, *answers in zip(asked, before, after, strict=True)
    ]
    table = Table("package", "section", "answer before", "answer after", highlight=False)
    for package, section, first, last in rows[:SHOWN]:
        style = "green" if last == section else ""
        # Brackets in them are no markup.
        table.add_row(*map(Text, (package[:44], section, first[:34])), Text(last, style))
    Console().print(table)
    steps = [row for row in read_metrics(demo / "output/metrics.jsonl") if row["kind"] == "step"]
    right = [sum(section == row[place] for _, section, *row in rows) for place in (0, 1)]
    print(f"{len(steps)} steps, loss {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}")
    print(f"exact answers: {right[0]} of {len(rows)} before, {right[1]} after")


if __name__ == "__main__":
    main()
