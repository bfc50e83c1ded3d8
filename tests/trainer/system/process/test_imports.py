"""Imports are not searched for garbage, while they are made and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from trainer.system.process import slow_log
from trainer.system.process.imports import pause_gc, speed_up_imports


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leave the collector of the other tests as it was."""
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_what_is_imported_is_never_looked_through() -> None:
    gc.enable()
    with pause_gc():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert len(made) == 1000
    assert not any(each is made for each in gc.get_objects())


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with pause_gc():
        pass
    assert not gc.isenabled()


def test_a_failed_import_turns_it_on_again() -> None:
    gc.enable()
    with pytest.raises(ImportError), speed_up_imports("nothing_like_it"):
        raise ImportError
    assert gc.isenabled()


def test_what_is_loaded_already_is_neither_announced_nor_frozen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gc.enable()
    frozen = gc.get_freeze_count()
    caplog.set_level("INFO")
    monkeypatch.setattr(slow_log, "PATIENCE", 0.0)
    with speed_up_imports("sys", "gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen
    assert caplog.messages == []
