"""The documentation as a site without addresses outside: `make docs` writes build/site.

The pages are copied to build/docs as they lie in the repository, so that their links hold. Diagrams
become pictures there, since the theme would load their renderer from elsewhere. A link to a page
or heading that does not exist ends it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGES = (
    "*.md",
    "docs",
    "playbooks/roles",
    "examples/*/*.md",
    "tests/soak/*.md",
    "tests/testbed/*.md",
)
KINDS = frozenset((".md", ".png", ".svg"))
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def stage(folder: Path) -> None:
    """Copy the pages and pictures that git knows, new ones too."""
    known = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PAGES)
    listed = subprocess.run(known, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if Path(name).suffix in KINDS and (ROOT / name).exists():
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
            if copy.suffix == ".md":
                draw_diagrams(copy)
    shutil.copyfile(HERE / "iframe-worker.js", folder / "iframe-worker.js")


def draw_diagrams(page: Path) -> None:
    """Replace the diagrams of a page with pictures beside it."""
    text = page.read_text(encoding="utf-8")
    *before, rest = DIAGRAM.split(text)
    if not before:
        return
    import mermaidx

    parts: list[str] = []
    for prose, source in zip(before[::2], before[1::2], strict=True):
        picture = page.with_name(f"{page.stem}-diagram-{len(parts) + 1}.svg")
        picture.write_text(mermaidx.render(source).svg(), encoding="utf-8")
        parts.append(f"{prose}![Diagram]({picture.name})")
    page.write_text("".join((*parts, rest)), encoding="utf-8")


def main() -> int:
    """Build the site; return the exit code."""
    folder = ROOT / "build"
    for name in ("docs", "site"):
        shutil.rmtree(folder / name, ignore_errors=True)
    stage(folder / "docs")
    shutil.copyfile(HERE / "zensical.toml", folder / "zensical.toml")
    return subprocess.run(
        (sys.executable, "-m", "zensical", "build", "--strict"), cwd=folder
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
