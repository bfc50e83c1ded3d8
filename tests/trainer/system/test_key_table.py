from __future__ import annotations

import pytest

from trainer.system.key_table import REPORTED_KEYS, KeyTable, UnknownKeys

TABLE = KeyTable(
    "a data line",
    used=frozenset(("text",)),
    harmless=frozenset(("id",)),
    refused={"images": "holds pictures, which no model here reads; remove it"},
)


def test_a_refused_key_is_named_with_what_to_do() -> None:
    assert TABLE.explain_refusal(["text", "images"]) == (
        "'images' holds pictures, which no model here reads; remove it"
    )
    assert TABLE.explain_refusal(["text", "id", "other"]) is None


def test_unknown_keys_are_counted_and_reported_once() -> None:
    unknown = UnknownKeys(TABLE)
    unknown.add(["text", "id", "lable"])
    unknown.add(["lable", "images", "a\nb"])
    assert unknown.report() == (
        "keys of a data line that are not used: 'lable' (2 times), 'a\\nb' (1 time)"
    )


def test_a_file_without_unknown_keys_reports_nothing() -> None:
    unknown = UnknownKeys(TABLE)
    unknown.add(["text", "id"])
    assert unknown.report() is None


def test_a_report_stays_short() -> None:
    unknown = UnknownKeys(TABLE)
    unknown.add([f"key{number}" + "x" * 1000 for number in range(REPORTED_KEYS + 5)])
    report = unknown.report()
    assert report is not None
    assert report.endswith("and 5 more")
    assert len(report) < 1000


def test_a_file_with_other_keys_in_each_line_takes_no_memory() -> None:
    unknown = UnknownKeys(TABLE)
    for number in range(2_000):
        unknown.add(["often", f"{number} {'x' * 1_000}"])
    report = unknown.report()
    assert report is not None
    assert "'often' (2,000 times)" in report
    assert report.endswith(" and 992 more, and other keys 1,001 times")
    assert len(report) < 1000


def test_a_key_stands_in_one_part_of_a_table() -> None:
    with pytest.raises(AssertionError, match="text"):
        KeyTable("x", used=frozenset(("text",)), harmless=frozenset(("text",)))
