"""The report of a run as Markdown: for a pull request, or below the model card of its adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launcher.errors import ConfigError
from launcher.views.dashboard.report import Report
from launcher.views.dashboard.state import Tree
from trainer.system.commandline.markdown_text import code_block, escape_markdown

_MOST_FAULTS = 20


def format_markdown(report: Report) -> str:
    """Return a report that is readable as text too; what a host says stays text."""
    return f"# Run {report.run_id}\n\n{_format_sections(report)}"


def model_card(report: Report) -> str:
    """Return the trainer's model card with the report below it; the card's metadata come first.

    Raises:
        ConfigError: the run has no card.
    """
    if not report.card:
        raise ConfigError(
            f"run {report.run_id} has no folder to publish, and so no model card; a run writes it "
            "at its end"
        )
    return f"{report.card.rstrip()}\n\n## How it was trained\n\n{_format_sections(report)}"


def _format_sections(report: Report) -> str:
    tree: Tree = report.state["report"]
    parts = [
        _format_table(("", ""), tree["results"]),
        _format_table(("trained", ""), tree["facts"]),
    ]
    if tree["confusion"]:
        parts.append("\n".join(_confusion_lines(tree["classes"], *tree["confusion"])))
    if tree["faults"]:
        parts.append(
            _format_table(("step", "fault", "next step after", "back after"), _fault_rows(tree))
        )
    if tree["answers"]:
        parts.append(_format_table(("prompt", "first answer", "last answer"), tree["answers"]))
    rows = [*tree["costs"], *((f"BLAKE3 of {what}", it) for what, it in tree["hashes"])]
    if rows:
        parts.append(_format_table(("", ""), rows))
    if tree["commands"]:
        commands = code_block(tree["commands"])
        settings = code_block(tree["settings"].splitlines(), "yaml")
        parts += [
            f"To repeat it, with the settings below as `run.yaml`:\n\n{commands}",
            f"<details><summary>run.yaml</summary>\n\n{settings}\n\n</details>",
        ]
    lacks = "\n".join(f"- {escape_markdown(line)}" for line in tree["missing"])
    return "\n\n".join([*parts, f"Not in this report:\n\n{lacks}"]) + "\n"


def _confusion_lines(
    classes: Sequence[str], step: int, counts: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Yield the lines of a confusion matrix: rows are labels, columns predictions."""
    yield f"Predictions (columns) by label (rows) at step {step:,}:\n"
    names = classes if len(classes) == len(counts) else [str(n) for n in range(len(counts))]
    rows = [(name, *map(str, row)) for name, row in zip(names, counts, strict=True)]
    yield _format_table(("", *names), rows)


def _fault_rows(tree: Tree) -> list[tuple[str, str, str, str]]:
    shown = tree["faults"][:_MOST_FAULTS]
    rows = [
        (
            f"{fault['step']:,}",
            fault["event"],
            _format_seconds(fault["delay_seconds"]),
            _format_seconds(fault["rejoin_seconds"]),
        )
        for fault in shown
    ]
    more = len(tree["faults"]) - len(shown)
    return [*rows, ("", f"and {more:,} more", "", "")] if more else rows


def _format_seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles, *cells = ([escape_markdown(cell) for cell in row] for row in (head, *rows))
    lines = [titles, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
