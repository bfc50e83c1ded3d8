"""One table of exit codes: errors and supervisors follow it."""

from __future__ import annotations

import ast
from pathlib import Path

import launcher.errors
from launcher.errors import ConfigError, LauncherError
from launcher.session.spec import RestartPolicy
from trainer.system.errors import EXIT_CODES, TrainerError, should_restart
from trainer.tracking.status import STATUS_FILE, StatusFile, first_status, says_over

ROOT = Path(__file__).parents[2]


def errors_of(top: str) -> dict[str, int]:
    """Return the classes below `top` that set `exit_code`, with their codes."""
    return {
        node.name: int(ast.literal_eval(line.value))
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code"
    }


def test_every_error_has_a_code_of_its_programs_table() -> None:
    found = errors_of("trainer")
    assert TrainerError.__name__ in found
    assert set(found.values()) <= set(EXIT_CODES)
    both = {LauncherError.exit_code, ConfigError.exit_code}
    assert {0, *both, *errors_of("launcher").values()} == set(launcher.errors.EXIT_CODES)


def test_every_supervisor_decides_alike(tmp_path: Path) -> None:
    """The launcher, a coordinator with local workers, and readers of a failed run's status."""
    for code in (-9, -6, *EXIT_CODES, 120, 255):
        assert RestartPolicy().is_restarted(code) == should_restart(code), code
        if code > 0:
            status = first_status("run", 1, 1)
            status.update(state="failed", exit_code=code)
            StatusFile(tmp_path).write_if_due(status)
            assert says_over(tmp_path / STATUS_FILE) == (not should_restart(code)), code


def test_no_other_module_lists_codes() -> None:
    """A tuple or set of two and more restarted codes is a second table."""
    restarted = {code for code in EXIT_CODES if should_restart(code)}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for top in ("launcher", "trainer")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, (ast.Tuple, ast.Set, ast.List))
        and {value.value for value in node.elts if isinstance(value, ast.Constant)} >= restarted
    ]
    assert found == []
