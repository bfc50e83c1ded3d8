"""A script as its operator named it: the bytes that were hashed are those that run. No torch.

A script runs only where a command line names it, by its digest where another process made that
command. No config has a key for it.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from trainer.system.errors import InputError, RefusedError, convert_read_errors, first_line
from trainer.system.regular_file import read_file

_REQUIRED, _OPTIONAL = ("model", "dataset", "loss"), ("metrics", "collate")


@dataclass(frozen=True)
class Script:
    """The content of a script, which has not run yet."""

    path: Path
    content: bytes
    digest: str
    """BLAKE2b of the content, in hex."""
    code: CodeType
    imports: list[str]
    """Packages that it needs, as far as they can be seen: not those below a condition."""


def read_script(path: Path, digest: str | None = None) -> Script:
    """Read a script.

    Args:
        digest: of the script that the start of the run named; None: this is that start.

    Raises:
        InputError: it cannot be read, is no Python, or lacks a function.
        RefusedError: it is another one.
    """
    with convert_read_errors(path, InputError):
        content = read_file(path, 1 << 20)
    found = hashlib.blake2b(content, digest_size=32).hexdigest()
    if digest not in (None, found):
        raise RefusedError(f"{path}: is not the script that the run was started with; start again")
    path = path.absolute()
    try:
        tree = ast.parse(content, str(path))
        code = compile(tree, str(path), "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else path
        raise InputError(
            f"{where}: the script: {type(error).__name__}: {first_line(error)}"
        ) from None
    imported = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    names = imported | {*code.co_names}
    for name in _REQUIRED:
        if not names & {name, "*"}:
            raise InputError(
                f"{path}: the script: has no function {name}; a script has model(), dataset(split)"
                " and loss(model, samples)"
            )
    return Script(path, content, found, code, _list_imports(tree))


def _list_imports(tree: ast.Module) -> list[str]:
    """Return the packages that a script and its functions import under no condition."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    bodies = [each.body for each in functions if each.name in (*_REQUIRED, *_OPTIONAL)]
    names: list[str | None] = []
    for node in sum(bodies, tree.body):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module)
    return sorted({name.partition(".")[0] for name in names if name})
