"""The AMI Meeting Corpus as meetings with minutes.

Reads the corpus' manual annotations (https://groups.inf.ed.ac.uk/ami/corpus, CC BY 4.0), unpacked:

- `corpusResources/meetings.xml`: the role of each speaker (`nxt_agent`)
- `words/MEETING.SPEAKER.words.xml`: one speaker's words, with times in seconds
- `abstractive/MEETING.abssumm.xml`: sentences below abstract, actions, decisions and problems

Roles serve as names, since the summaries speak of roles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from meetings.minutes import ActionItem, Meeting, Minutes
from meetings.texts import PHRASES
from trainer.system.errors import InputError, convert_read_errors
from trainer.system.regular_file import read_file

ROLES = {
    "PM": "Project Manager",
    "ME": "Marketing Expert",
    "UI": "User Interface Designer",
    "ID": "Industrial Designer",
}
UNASSIGNED = "Unassigned"
"""The owner of an action that names none."""
# The corpus' own parts, by the first letters of a meeting; the others are for training.
VALIDATION = ("ES2003", "ES2011", "IS1008", "TS3004", "TS3006")
TEST = ("ES2004", "ES2014", "IS1009", "TS3003", "TS3007")

_MAX_BYTES = 64 << 20
_PAUSE = 1.0  # seconds of silence between two turns of one speaker
_OWNERS = "|".join(
    [*ROLES.values(), *ROLES, "team", "group", "members", "participants", "everyone"]
)
_ACTION = re.compile(
    rf"^(?:all )?(?:the )?(?P<owner>(?:{_OWNERS})(?:(?:,| and|, and)(?: the)? (?:{_OWNERS}))*)"
    r" (?:will|must|should|is going to|are going to|has to|have to|needs? to"
    r"|(?:is|are|was|were) (?:to|asked to|told to|instructed to)) (?P<task>.+)$",
    re.IGNORECASE,
)


def read_corpus(folder: Path) -> dict[str, list[Meeting]]:
    """Return the meetings that have a summary, by the corpus' own parts; none is empty.

    Raises:
        InputError: the folder is not the corpus, or a file of it cannot be used.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    summaries = sorted((folder / "abstractive").glob("*.abssumm.xml"))
    if not summaries:
        raise InputError(
            f"{folder}: has no abstractive/*.abssumm.xml; give the folder into which the manual"
            " annotations of the AMI corpus were unpacked"
        )
    roles = _roles(folder / "corpusResources" / "meetings.xml")
    parts: dict[str, list[Meeting]] = {}
    for path in summaries:
        name = path.name.removesuffix(".abssumm.xml")
        parts.setdefault(_part(name), []).append(_meeting(folder, name, roles.get(name, {})))
    return {name: parts[name] for name in ("train", "validation", "test") if name in parts}


def _part(meeting: str) -> str:
    if meeting.startswith(VALIDATION):
        return "validation"
    return "test" if meeting.startswith(TEST) else "train"


def _meeting(folder: Path, name: str, roles: dict[str, str]) -> Meeting:
    sections = _sections(folder / "abstractive" / f"{name}.abssumm.xml")
    spoken: list[tuple[float, str, str]] = []
    files = sorted((folder / "words").glob(f"{name}.*.words.xml"))
    if not files:
        raise InputError(f"{folder / 'words'}: has no words of meeting {name}")
    for path in files:
        agent = path.name.split(".")[1]
        speaker = roles.get(agent, f"Speaker {agent}")
        spoken += [(begin, speaker, text) for begin, text in _utterances(path)]
    lines: list[str] = []
    last = ""
    for _, speaker, text in sorted(spoken):
        if speaker == last:
            lines[-1] += f" {text}"
        else:
            lines.append(f"{speaker}: {text}")
        last = speaker
    present = ", ".join(dict.fromkeys(speaker for _, speaker, _ in sorted(spoken)))
    transcript = "\n".join([f"Meeting {name}", f"Present: {present}", "", *lines])
    summary = " ".join(sections["abstract"] + sections["problems"])
    items = [_action(sentence) for sentence in sections["actions"]]
    return Meeting(
        f"{transcript}\n\n{PHRASES['instructions'][0]}",
        Minutes(summary, sections["decisions"], items),
    )


def _utterances(path: Path) -> Iterator[tuple[float, str]]:
    """Yield what one speaker says between two pauses, with its begin in seconds."""
    words: list[str] = []
    begin = end = 0.0
    for word in _parse(path).iter("w"):
        text = (word.text or "").strip()
        if not text:
            continue
        # A few words have no times: they follow the one before.
        start = _seconds(path, word, "starttime", end)
        if words and start - end > _PAUSE:
            yield begin, " ".join(words)
            words = []
        if not words:
            begin = start
        if word.get("punc") == "true" and words:
            words[-1] += text
        else:
            words.append(text)
        end = _seconds(path, word, "endtime", start)
    if words:
        yield begin, " ".join(words)


def _seconds(path: Path, word: ElementTree.Element, key: str, default: float) -> float:
    value = word.get(key)
    try:
        return default if value is None else float(value)
    except ValueError:
        raise InputError(f"{path}: {key} {value!r} is not a number of seconds") from None


def _sections(path: Path) -> dict[str, list[str]]:
    """Return the sentences of each section of a summary."""
    root = _parse(path)
    found: dict[str, list[str]] = {}
    for section in ("abstract", "actions", "decisions", "problems"):
        texts = (
            " ".join("".join(sentence.itertext()).split())
            for part in root.iter(section)
            for sentence in part.iter("sentence")
        )
        found[section] = [text for text in texts if text.strip("*. ") not in ("", "NA")]
    if not found["abstract"]:
        raise InputError(f"{path}: has no abstract")
    return found


def _action(sentence: str) -> ActionItem:
    match = _ACTION.match(sentence.rstrip(". "))
    if match is None:
        return ActionItem(UNASSIGNED, sentence.rstrip(". "))
    owner = re.sub(r"\bthe ", "", match["owner"], flags=re.IGNORECASE)
    return ActionItem(ROLES.get(owner, owner.title().replace(" And ", " and ")), match["task"])


def _roles(path: Path) -> dict[str, dict[str, str]]:
    """Return the names of the speakers of each meeting, by their letters."""
    return {
        meeting.get("observation", ""): {
            speaker.get("nxt_agent", ""): ROLES[speaker.get("role", "")]
            for speaker in meeting.iter("speaker")
            if speaker.get("role") in ROLES
        }
        for meeting in _parse(path).iter("meeting")
    }


def _parse(path: Path) -> ElementTree.Element:
    """Parse an XML file without a document type, so without entities of its own.

    Raises:
        InputError: it cannot be read, or is not such a file.
    """
    with convert_read_errors(path, InputError):
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(
                f"{path}: is larger than {_MAX_BYTES >> 20} MiB, unlike any file of the corpus"
            )
        data = read_file(path, _MAX_BYTES)
    # A NUL byte: UTF-16, which would hide the declaration. Other encodings extend ASCII.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data or b"\0" in data:
        raise InputError(
            f"{path}: declares a document type or is no plain XML; the corpus has none"
        )
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # also unknown encodings
        raise InputError(f"{path}: not XML: {error}") from None
