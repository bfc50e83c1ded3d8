"""The page as one file with its data inside: it asks no server and loads nothing.

Its modules become one script: each a function that is called once, in the order of their imports.
Only the forms of import and export that the page uses are understood; anything else is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parent / "page"
_IMPORT = re.compile(r'import \{ (\w+(?:, \w+)*) \} from "\./(\w+)\.js";')
_EXPORT = re.compile(r"export ((?:async )?function|class|const) (\w+)")


def build_single_file(data: Mapping[str, str]) -> str:
    """Return the page as HTML that needs no server.

    Args:
        data: JSON texts by name, which `data.js` finds: `home`, the page to show, and by its path
            what the page would ask a server for.

    The policy lets nothing run and nothing load but what this file has.
    """
    styles = [_read_page_file(name) for name in ("uplot.css", "style.css")]
    scripts = [_read_page_file("uplot.js"), join_modules("app")]
    drawing = base64.b64encode(_read_page_file("icon.svg").encode()).decode()
    icon = f"data:image/svg+xml;base64,{drawing}"
    policy = "; ".join(
        [
            "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:",
            " ".join(["style-src", *map(_csp_hash, styles)]),
            " ".join(["script-src", *map(_csp_hash, scripts)]),
        ]
    )
    members = ",".join(f"{json.dumps(name)}:{text}" for name, text in data.items())
    inside = f"{{{members}}}".replace("<", "\\u003c")  # of JSON, only texts have this sign
    head = "".join(f"<style>{text}</style>\n" for text in styles)
    body = f'<script type="application/json" id="data">{inside}</script>\n'
    body += "".join(f"<script>{text}</script>\n" for text in scripts)
    page = re.sub(r"<(?:link|script)\b.*\n", "", _read_page_file("index.html"))
    meta = f'<meta http-equiv="content-security-policy" content="{policy}">\n'
    page = page.replace('<meta name="viewport"', f'{meta}<meta name="viewport"')
    page = page.replace("</head>", f'<link rel="icon" href="{icon}">\n{head}</head>')
    return page.replace('"icon.svg"', f'"{icon}"').replace("</body>", f"{body}</body>")


def join_modules(first: str, folder: Path = PAGE) -> str:
    """Return a module of the page and all that it imports as one script without modules.

    Raises:
        ValueError: a module imports or exports in a way that is not understood, or they import
            each other.
    """
    done: dict[str, str] = {}
    _join_module(first, folder, done, ())
    return '"use strict";\n' + "".join(done.values())


def _join_module(name: str, folder: Path, done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"{name}.js imports itself, by way of {' and '.join(above)}")
    if name in done:
        return
    lines: list[str] = []
    exported: list[str] = []
    for number, line in enumerate((folder / f"{name}.js").read_text().splitlines(), 1):
        if found := _IMPORT.fullmatch(line):
            _join_module(found[2], folder, done, (*above, name))
            line = f"const {{ {found[1]} }} = $_{found[2]};"
        elif found := _EXPORT.match(line):
            exported.append(found[2])
            line = line.removeprefix("export ")
        elif re.match(r"(import|export)\b", line) or re.search(r"\bimport\s*[.(]|</?script", line):
            raise ValueError(f"{name}.js:{number}: unsupported syntax: {line}")
        lines.append(line)
    body = "\n".join(lines)
    done[name] = (
        f"const $_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
    )


def _read_page_file(name: str) -> str:
    return (PAGE / name).read_text()


def _csp_hash(text: str) -> str:
    """Return a text as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
