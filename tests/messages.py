"""All texts of the product that a person may see, once each, to be read from top to bottom.

    python -m tests.messages                  # log lines, errors, card lines: a line each
    python -m tests.messages launcher/runs    # of one folder

A text is a string of the source with three words or more that is no docstring; what is put into it
stands as `{expression}`. Few of them are for other eyes (a line of a unit file, a query): a list
made from the calls that print would miss the many texts which a function only returns.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FEWEST_WORDS = 3


def list_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each message in a file of Python."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # A string that is a statement is a docstring, of a module, function, class or attribute; a
    # part of an f-string stands in the whole.
    hidden = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    hidden |= {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if node in hidden or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        text = " ".join(_as_text(node).split())
        if len(text.split()) >= FEWEST_WORDS:
            yield node.lineno, text


def _as_text(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{_expression(part)}}}"
        for part in node.values
    )


def _expression(part: ast.expr) -> str:
    return ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else ast.unparse(part)


def main(folders: list[str]) -> int:
    """Print the messages of the folders, those of the whole product if none is named."""
    for folder in folders or ["launcher", "trainer"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, text in sorted(list_messages(path)):
                line = f"{path.relative_to(ROOT)}:{number}: {text}"
                print(line.encode("utf-8", "backslashreplace").decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
