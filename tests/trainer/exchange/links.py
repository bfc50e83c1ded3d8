"""Links with nothing behind them but what a test names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from trainer.exchange.protocol.wire import Frame
from trainer.exchange.transport.link import Link


def unwanted(_link: Link, _frame: Frame) -> None:
    """Fail: nothing was to be received."""
    raise AssertionError


def make_link(
    opened: Callable[[Link], Any] = lambda _: None,
    *,
    run: int = 0,
    frame: Callable[[Link, Frame], Any] = unwanted,
    heard: Callable[[Link], Any] = lambda _: None,
    closed: Callable[[Link, str], Any] = lambda _link, _reason: None,
) -> Link:
    """Return a link that has not begun."""
    return Link(run, opened=opened, frame=frame, on_bytes=heard, closed=closed, max_queued=9)


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not true():
        await asyncio.sleep(0.01)


async def end_all(links: list[Link]) -> None:
    """End links that leave the list when they are closed."""
    for link in list(links):
        link.abort("over")
    await until(lambda: not links)
