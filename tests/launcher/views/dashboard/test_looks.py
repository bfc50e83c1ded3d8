"""How the page looks, in a real browser: curves of pairs, and lines that break between words."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rig.browser import Browser
from tests.launcher.views.dashboard.recorded_run import RUN_ID, RecordedRun
from tests.launcher.views.dashboard.serving import Server
from tests.launcher.views.dashboard.test_in_browser import browser, pytestmark, recorded, server

__all__ = ["browser", "pytestmark", "recorded", "server"]


def test_pairs_have_curves_of_rewards_and_accuracy(
    recorded: RecordedRun, server: Server, browser: Browser
) -> None:
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelectorAll('canvas').length === 5")
    shown = "[...document.querySelectorAll('.chart:not([hidden])')].map((each) => each.innerText)"
    assert not [each for each in browser.run(shown) if "Rewards" in each], "no pairs, no rewards"
    recorded.metrics.record_validation(
        10,
        loss=0.5,
        reward_chosen=0.125,
        reward_rejected=-0.5,
        reward_margin=0.625,
        reward_accuracy=0.75,
    )
    browser.wait("document.querySelectorAll('canvas').length === 7")
    told = [" ".join(each.split()) for each in browser.run(shown)]
    assert "Rewards better 0.125 worse -0.500 margin 0.625" in told
    assert "Pairs in order accuracy 75 %" in told
    assert browser.errors == []


@pytest.mark.parametrize("width", [1280, 380])
def test_no_name_or_option_is_broken_at_a_hyphen(
    recorded: RecordedRun, server: Server, browser: Browser, tmp_path: Path, width: int
) -> None:
    command = "  trainer generate /srv/motley/runs/output --prompt Hello --max-new-tokens 8"
    recorded.status["summary"] = [command * 2]
    recorded.finish(tmp_path / "state")
    browser.looks(width, dark=False)
    browser.open(f"{server.url}#/run/{RUN_ID}")
    browser.wait("document.querySelector('details > pre') !== null")
    lines = """(place) => {
      const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT), broken = [];
      for (let node; (node = walker.nextNode());)
        for (const { index, 0: word } of node.data.matchAll(/[^\\s/]*-[^\\s/]*/g)) {
          const range = document.createRange();
          range.setStart(node, index); range.setEnd(node, index + word.length);
          if (new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size > 1)
            broken.push(word);
        }
      return broken;
    }"""
    narrow = ".proofs" if width > 1000 else "pre"  # a name longer than its line has no other end
    for place in ("pre", narrow, "section[aria-labelledby=events]"):
        assert browser.run(f"({lines})(document.querySelector('{place}'))") == [], place
    assert command in browser.run("document.querySelector('pre').textContent")
