"""Names that the project wants to be rid of: their number may only fall.

Each rule counts what is left in `launcher` and `trainer`, and fails with a list of every offence
when the count exceeds its limit. Whoever removes some lowers the limit; a count below its limit
passes, since several people rename at once. Cells of tables are checked in `test_documents.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests import ROOT

LIMITS = {
    "one word": 36,
    "participle": 0,
    "genitive": 0,
    "home-made word": 0,
    "docstring": 0,
}
"""The most offences of each rule."""
MOST_WORDS = 25
"""The words that the project itself has to name, in docs/glossary.md."""
MOST_ALLOWED = 30
ALLOWED = {
    "closed": "as of Python's own files",
    "unchanged": "as torch's identity hooks",
}
"""Names that break a rule for a reason."""

VERBS_AND_NOUNS = set(
    re.findall(
        r"\w+",
        """
    abort accept accumulate act adapt add address admit adopt advance allocate amend announce append
    apply archive ask assign attach audit authenticate authorise autotune backward balance bind
    break broadcast build calibrate call cancel certify check choose clamp claim classify clear
    clip close collate collect combine commit compare compile complete compress compute concatenate
    config configure confirm connect convert copy cosine count create cut deal decide declare
    decode decompress deduplicate deliver delete dequantize derive describe detach detect diagnose
    digest discard disconnect discover discuss dismiss distill divide download drain draw drop emit
    encode enqueue enter entropy escape estimate evaluate examine exchange exit expand expel explain
    export extend extract fetch fill filter find finetune finish fit flatten flush follow forget
    fork format forward free freeze gather gemm generate get greet group halt halve handle hash hide
    import infer init initialize insert inspect install interrupt invalidate issue iterate join
    judge kill label lap launch limit link list listen load lock log look loss lookup main make map
    mark mask match measure mend merge migrate mix mount move multiply name negotiate norm normalize
    notify number observe offer open order pack pad parallelize parse partition pass patch pause
    perform pick pin ping place plan poll pool pop post postpone prefill prepare press print probe
    process project prompt prove prune publish pull push put quantise quantize quarantine query
    queue raise rank read receive recognise recompute reconsider record redeal reduce refresh refuse
    register reject release remove rename render renumber reopen repeat replace report request
    require reset reshape resize resolve restart restore resume retry return reverse rollback rotate
    round route run sample save scale scan scatter schedule score seal search seek select send
    serialize serve set shard shrink shutdown sign signal skip sleep slice snapshot softmax sort
    spawn split spread start step stop store stream strip submit sum summarize supervise survey
    sweep swiglu switch sync synchronize take tell tokenise tokenize touch train transfer transform
    translate transmit transpose trim try tune uninstall unlock unpack unpad unwrap update upload
    validate verify view visit wait walk warm watch weigh wrap write yield
    answer attend begin decorate doctor down end fail keep linear logits nbytes status up
    readable readinto writable seekable fileno fromkeys readline readlines
    """,
    )
)
"""Words that suffice: a verb whose object is the class, a term of the field, Python's own."""

PARTICIPLE = re.compile(r"(?!(?:need|feed|seed|speed|embed|shed|bleed|exceed|proceed)$)[a-z]+ed$")
IRREGULAR = set(
    re.findall(
        r"\w+",
        """
    begun bound broken built chosen cut dealt done drawn driven fallen felt found frozen given gone
    heard held hidden kept known laid learnt led left lent lost made meant met owed paid proven read
    said seen sent shown shut spent split spoken spread stood stuck sunk swept taken taught told
    torn understood won worn written
    """,
    )
) - {"cut", "read", "split", "spread", "shut"}
HOME_MADE = set(
    re.findall(
        r"\w+",
        """
    settle settled settles said told heard spoken speaks owed owes owing beat beats journal keeper
    keepers stranger strangers wish wishes wished hall seat seats voucher vouchers boxed headway
    homecoming telling lesson
    """,
    )
)
"""The words of several or of home-made meanings; each has a term of the field."""
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
FORBIDDEN_STARTS = ("Of ", "What ")


def test_no_more_one_word_functions() -> None:
    """A function is a verb phrase with an object."""
    check_limit("one word")


def test_no_more_participles() -> None:
    """A participle alone says neither what a function does nor what it returns."""
    check_limit("participle")


def test_no_more_genitives() -> None:
    """`find_state_folder`, not `place_of`: the name tells what comes back."""
    check_limit("genitive")


def test_no_more_home_made_words() -> None:
    """One word has one meaning over the whole tree, and that of the field."""
    check_limit("home-made word")


def test_no_more_docstrings_that_begin_with_of_or_what() -> None:
    check_limit("docstring")


def test_the_exceptions_are_few() -> None:
    assert len(ALLOWED) <= MOST_ALLOWED
    assert [name for name, reason in ALLOWED.items() if not reason] == []


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ("def said(): ...", ["participle", "home-made word"]),
        ("def anew(): ...", ["one word"]),
        ("def _checked(): ...", ["participle"]),
        ("class A:\n    @property\n    def anew(self): ...", []),
        ("@click.command()\ndef anew(): ...", []),
        ("@click.option()\ndef anew(): ...", ["one word"]),
        ("def place_of(): ...", ["genitive"]),
        ("class A:\n    @property\n    def _size_of(self): ...", ["genitive"]),
        ("def need(): ...", ["one word"]),
        ("def read_state(): ...", []),
        ("def save(): ...", []),
        ("class TaughtHall: ...", ["home-made word"]),
        ("owed = 1", ["home-made word"]),
        ("def f_g(wish): ...", ["home-made word"]),
        ('def f_g():\n    "What is."', ["docstring"]),
        ('"""Of a run."""', ["docstring"]),
        ('STEPS = 3\n"""Of a run."""', ["docstring"]),
        ('STEPS = 3\n"""What a run does."""', ["docstring"]),
        ('STEPS: int\n"""Steps of a run."""', []),
    ],
)
def test_what_is_an_offence(source: str, rules: list[str]) -> None:
    assert [rule for rule, *_ in offences(ast.parse(source))] == rules


def test_the_glossary_is_short_and_found() -> None:
    """Every other word is the field's."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\| \*\*", page, re.MULTILINE)
    assert 0 < len(entries) <= MOST_WORDS
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def check_limit(rule: str) -> None:
    found = [
        f"{file}:{line}: {name}"
        for file, rows in offences_by_file().items()
        for broken, line, name in rows
        if broken == rule
    ]
    assert len(found) <= LIMITS[rule], f"{len(found)}, limit {LIMITS[rule]}:\n" + "\n".join(found)


@cache
def offences_by_file() -> dict[Path, list[tuple[str, int, str]]]:
    files = (
        path for tree in ("launcher", "trainer") for path in sorted((ROOT / tree).rglob("*.py"))
    )
    return {
        path.relative_to(ROOT): list(offences(ast.parse(path.read_text(encoding="utf-8"))))
        for path in files
    }


def offences(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield the rule that is broken, the line, and the name or the docstring's first words."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name.endswith("_of"):
                yield "genitive", node.lineno, node.name
            if not is_property(node):
                yield from offences_of_function(node)
    for node in nodes:
        for name in bound_names(node):
            if name not in ALLOWED and HOME_MADE & {word.lower() for word in WORDS.findall(name)}:
                yield "home-made word", getattr(node, "lineno", 1), name
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node, clean=False) or ""
            if text.startswith(FORBIDDEN_STARTS):
                yield "docstring", getattr(node, "lineno", 1), text[:50].splitlines()[0]
        for line, text in attribute_docstrings(node):
            if text.startswith(FORBIDDEN_STARTS):
                yield "docstring", line, text[:50].splitlines()[0]


def attribute_docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring below an assignment of a block."""
    body = getattr(node, "body", None)
    for assignment, text in pairwise(body if isinstance(body, list) else []):
        match assignment, text:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(words))):
                yield text.lineno, words


def offences_of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, int, str]]:
    name = node.name.strip("_")
    if "_" in name or node.name.startswith("__") or node.name in ALLOWED or is_command(node):
        return
    if name in IRREGULAR or PARTICIPLE.match(name):
        yield "participle", node.lineno, node.name
    elif name not in VERBS_AND_NOUNS:
        yield "one word", node.lineno, node.name


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as a value, as properties and overloads' setters are."""
    return any(
        "property" in ast.unparse(decorator) or "setter" in ast.unparse(decorator)
        for decorator in node.decorator_list
    )


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a command of Click, which is named by what a user types."""
    return any(
        re.match(r"[\w.]+\.(command|group)\b", ast.unparse(decorator))
        for decorator in node.decorator_list
    )


def bound_names(node: ast.AST) -> list[str]:
    """Return the names that a node defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case _:
            return []
