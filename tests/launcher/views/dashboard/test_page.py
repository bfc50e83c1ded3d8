"""The files of the page: small, vendored unchanged, and nothing from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from launcher.views.dashboard.single_file import PAGE, join_modules
from tests import ROOT

FILES = {path.name: path.read_bytes() for path in PAGE.iterdir()}


def test_uplot_is_what_was_published() -> None:
    for line in FILES["uplot.sha256"].decode().splitlines():
        digest, name = line.split()
        assert hashlib.sha256(FILES[name]).hexdigest() == digest, name
    assert b"The MIT License" in FILES["uplot.LICENSE"]


def test_the_page_is_small() -> None:
    sent = [
        data for name, data in FILES.items() if name.split(".")[-1] in ("html", "js", "css", "svg")
    ]
    assert sum(len(gzip.compress(data, 6)) for data in sent) <= 60_000


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    for name, data in FILES.items():
        if name.startswith("uplot"):
            continue
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)^\s*//.*$|\s// .*$", "", text), name
        assert not re.search(
            r"\.innerHTML\s*=(?!=)|insertAdjacentHTML|document\.write|\beval\(", text
        ), name
        assert not re.search(r"\son\w+=\"|<style|\sstyle=", text), name  # which the CSP refuses


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('import * as all from "./other.js";', "unsupported syntax"),
        ('import { a } from "https://elsewhere/other.js";', "unsupported syntax"),
        ("export default 1;", "unsupported syntax"),
        ("export let a = 1;", "unsupported syntax"),
        ("const a = import('./other.js');", "unsupported syntax"),
        ("const a = '</script>';", "unsupported syntax"),
        ('import { a } from "./app.js";', "imports itself"),
    ],
)
def test_a_module_in_another_form_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=why):
        join_modules("app", tmp_path)


def test_modules_become_one_script_each_once_and_after_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text(
        'import { b } from "./b.js";\nimport { c } from "./c.js";\nb(c);\n'
    )
    (tmp_path / "b.js").write_text(
        'import { c } from "./c.js";\nexport const b = () => c;\nconst own = 1;\n'
    )
    (tmp_path / "c.js").write_text("export async function c() {}\nexport class D {}\n")
    assert join_modules("app", tmp_path) == (
        '"use strict";\n'
        "const $_c = (() => {\nasync function c() {}\nclass D {}\nreturn { c, D };\n})();\n"
        "const $_b = (() => {\nconst { c } = $_c;\nconst b = () => c;\nconst own = 1;\n"
        "return { b };\n})();\n"
        "const $_app = (() => {\nconst { b } = $_b;\nconst { c } = $_c;\nb(c);\n"
        "return {  };\n})();\n"
    )


def test_the_wheel_has_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "views/dashboard/page/*" in project["tool"]["setuptools"]["package-data"]["launcher"]
