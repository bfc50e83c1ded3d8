"""The converter of the AMI corpus, on a sample in its format that was written for this test."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.commands.generate_data import generate_data
from trainer.data.meetings.ami import read_corpus
from trainer.data.meetings.minutes import ActionItem
from trainer.data.samples import read_samples
from trainer.system.errors import InputError

SAMPLE = Path(__file__).parent / "ami_sample"
WORDS = "words/ES2900a.A.words.xml"
SUMMARY = "abstractive/ES2900a.abssumm.xml"


def test_a_meeting_has_turns_by_role_and_minutes():
    parts = read_corpus(SAMPLE)
    assert {name: len(found) for name, found in parts.items()} == {"train": 1, "validation": 1}
    (meeting,) = parts["train"]
    transcript = meeting.request.split("\n\n")
    assert transcript[0] == "Meeting ES2900a\nPresent: Project Manager, Industrial Designer"
    assert transcript[1].splitlines() == [
        "Project Manager: Okay, the café remote.",
        "Industrial Designer: Rubber but- buttons? Fine.",  # two utterances, nobody in between
        "Project Manager: Then it's yellow.",
    ]
    minutes = meeting.minutes
    assert minutes.summary == (
        "The team talked about the case. They compared rubber with plastic."
        " Rubber may be too expensive."
    )
    assert minutes.decisions == ["The remote will be yellow."]
    assert minutes.action_items == [
        ActionItem("Industrial Designer", "look for rubber buttons"),
        ActionItem("Project Manager and Industrial Designer", "model the case"),
        ActionItem("Unassigned", "Prices are to be found"),
    ]


def test_files_are_read_in_the_encoding_that_they_declare(tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(SAMPLE, folder)
    content = (folder / WORDS).read_bytes()
    assert b'encoding="ISO-8859-1"' in content
    (folder / WORDS).write_bytes(content.replace(b"&#233;", b"\xe9"))
    assert read_corpus(folder) == read_corpus(SAMPLE)


def test_what_is_absent_stays_absent():
    (meeting,) = read_corpus(SAMPLE)["validation"]
    assert "Project Manager: Hello\nSpeaker B: Hi" in meeting.request  # B has no role
    assert meeting.minutes.action_items == []
    assert meeting.minutes.decisions == []


def test_the_command(tmp_path):
    run = CliRunner().invoke
    result = run(generate_data, ["ami", "--from", str(SAMPLE), "-o", str(tmp_path / "data")])
    assert result.exit_code == 0, result.output
    assert "1 train, 1 validation meetings" in result.output
    (sample,) = read_samples(tmp_path / "data" / "train.jsonl", "causal-lm")
    assert [message.role for message in sample.messages] == ["user", "assistant"]
    line = json.loads((tmp_path / "data" / "train.jsonl").read_text())
    assert line["action_items"][0] == {
        "owner": "Industrial Designer",
        "task": "look for rubber buttons",
        "due": None,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ami"], "give --from DIR"),
        (["ami", "--from", "x", "--seed", "1"], "takes no --seed"),
        (["meetings", "--from", "x"], "takes no --from"),
    ],
)
def test_options_that_do_not_belong_together(arguments, said):
    result = CliRunner().invoke(generate_data, [*arguments, "-o", "nowhere"])
    assert result.exit_code == 2
    assert said in result.output
    assert not Path("nowhere").exists()


BOMB = """<?xml version="1.0"?>
<!DOCTYPE root [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<root><w>&b;</w></root>
"""
EXTERNAL = '<!DOCTYPE root [<!ENTITY x SYSTEM "file:///etc/passwd">]><root><w>&x;</w></root>'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (WORDS, BOMB.encode(), "declares a document type"),
        (WORDS, EXTERNAL.encode(), "declares a document type"),
        (SUMMARY, BOMB.encode("utf-16"), "is no plain XML"),
        (WORDS, b"<root><w></root>", "not XML: mismatched tag: line 1"),
        (WORDS, b"", "not XML: no element found"),
        (WORDS, b'<?xml version="1.0" encoding="klingon"?><r/>', "not XML: unknown encoding"),
        (WORDS, b'<r><w starttime="soon">a</w></r>', "starttime 'soon' is not a number"),
        (SUMMARY, b"<root><abstract/></root>", "has no abstract"),
        ("corpusResources/meetings.xml", None, "cannot be read: No such file"),
        (WORDS, None, "has no words of meeting ES2900a"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, content, said):
    folder = tmp_path / "corpus"
    shutil.copytree(SAMPLE, folder)
    if content is not None:
        (folder / name).write_bytes(content)
    else:
        (folder / name).unlink()
        (folder / "words/ES2900a.B.words.xml").unlink()
    result = CliRunner().invoke(
        generate_data, ["ami", "--from", str(folder), "-o", str(tmp_path / "data")]
    )
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "data").exists()


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        read_corpus(tmp_path / "none")
    with pytest.raises(InputError, match="give the folder into which"):
        read_corpus(tmp_path)
