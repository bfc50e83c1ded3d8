"""What is said and written in meetings: `texts.json`, and `settings/`, a file a group of people.

Every third text of a list is for validation. Values in braces: `topic` is a noun phrase, `do` and
`task` are infinitives without `to`, `pro`, `con` and `background` clauses; a name with a capital,
as `Pro`, is the same at the start of a sentence. In minutes `old` is a decision that no longer
stands, `oldcon` what spoke against it, and `other` a proposal that was not taken.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from meetings.issue import MeetingSetting

_HERE = Path(__file__).parent
_TREE = json.loads((_HERE / "texts.json").read_text(encoding="utf-8"))

NAMES: list[str] = _TREE["names"]
MONTHS: list[str] = _TREE["months"]
DUES: list[str] = _TREE["dues"]
"""From early to late."""
PHRASES: dict[str, list[str]] = {**_TREE["said"], **_TREE["written"]}
"""By what people do with them, in a meeting and in its minutes."""
ASIDES: list[list[str]] = _TREE["asides"]
"""Small talk, which adds nothing to the minutes; turns alternate between two or three speakers."""
_SETTING = TypeAdapter(MeetingSetting)
_FILES = sorted((_HERE / "settings").glob("*.json"))
SETTINGS = [_SETTING.validate_json(path.read_bytes()) for path in _FILES]
