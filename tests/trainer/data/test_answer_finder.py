"""Answers are found in templates that write another text in a conversation than in its prompts.

The templates are small ones of the kinds that published templates show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.families import Family
from tests.trainer.data.test_chat_template import (
    CALL,
    SEVERAL,
    TOOLS,
    WEATHER,
    Turn,
    turn,
    write_data,
    write_model,
)
from trainer.config.data import LostText
from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.samples import read_file, read_samples
from trainer.data.survey import check_conversations

MARKS = ("<|begin|>", "<|end|>", "<|user|>", "<|bot|>", "<|stop|>", "[/ask]")
BRIEF = turn("system", "Be brief please.")
ONE = [turn("user", "Hello there"), turn("assistant", "Hi you!")]
AND = [turn("user", "and?"), turn("assistant", "yes.")]
CALLS = turn("assistant", "", tool_calls=[CALL])
RESULT = turn("tool", "sunny", name="weather")


class Chat:
    """A conversation in a template."""

    def __init__(
        self,
        folder: Path,
        source: str,
        turns: list[Turn],
        lost_text: LostText = "refuse",
        stops: tuple[str, ...] = (),
    ) -> None:
        model = write_model(folder / "model", Family(MARKS, "<|end|>", None, source), source)
        named: dict[str, Any] = {
            "eos_token_id": [Encoder(model).tokenizer.token_to_id(each) for each in stops]
        }
        (model / "generation_config.json").write_text(json.dumps(named))
        self.encoder = Encoder(model, lost_text)
        tools = [WEATHER] if any("tool_calls" in each for each in turns) else None
        self.data = write_data(folder / "a.jsonl", (turns, tools))
        (self.sample,) = read_samples(self.data, "causal-lm")

    def texts(self) -> tuple[str, str]:
        """Return the whole text and the learned part."""
        ids, labels = self.encoder.encode_conversation(self.sample)
        learned = [label for label in labels if label != IGNORED]
        whole, part = (
            self.encoder.tokenizer.decode(each, skip_special_tokens=False)
            for each in (ids, learned)
        )
        return whole, part

    def prompt(self) -> str:
        return self.encoder.tokenizer.decode(
            self.encoder.encode_prompt(self.sample), skip_special_tokens=False
        )

    def warnings(self) -> list[str]:
        return check_conversations(read_file(self.data, "causal-lm"), self.encoder)


MOVED = """
{%- set system = messages[0].content + ' | ' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{- '[ask]' + (system if loop.last else '') + m.content + '[/ask]' }}
    {%- else %}{{- m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
"""
"""As Mistral Nemo's: a system's text is written into the user's turn that is asked."""


def test_a_last_answer_continues_its_prompt_if_that_is_another_text(tmp_path: Path) -> None:
    chat = Chat(tmp_path, MOVED, [BRIEF, *ONE])
    prompt = "[ask]Be brief please. | Hello there[/ask]"
    assert chat.prompt() == prompt
    assert chat.texts() == (f"{prompt}Hi you!<|end|>", "Hi you!<|end|>")


def test_an_earlier_answer_with_another_prompt_is_refused_or_accepted(tmp_path: Path) -> None:
    turns = [BRIEF, *ONE, *AND]
    with pytest.raises(ConversationError, match="the text before turn 3 when") as caught:
        Chat(tmp_path, MOVED, turns).texts()
    assert "set data.lost_text: accept" in str(caught.value)
    whole, learned = Chat(tmp_path, MOVED, turns, "accept").texts()
    assert learned == "Hi you!<|end|>yes.<|end|>"
    assert (
        whole
        == f"[ask]Hello there[/ask]Hi you!<|end|>[ask]{BRIEF['content']} | and?[/ask]yes.<|end|>"
    )
    context = [BRIEF, ONE[0], {**ONE[1], "weight": 0}, *AND]
    assert Chat(tmp_path, MOVED, context).texts() == (whole, "yes.<|end|>")


CHATML = """
{%- for m in messages %}
    {{- '<|begin|>' + m.role + '\\n' }}
    {%- if m.tool_calls %}{{- m.tool_calls[0].function | tojson }}
    {%- else %}BEFORE{{- m.content }}{%- endif %}AFTER
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{%- endif %}
"""
CALLED = '{"name": "weather", "arguments": {"city": "Köln"}}<|end|>'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "{{- '\\n' if m.role == 'tool' and not loop.last }}"),
        ("{{- '<think>\\n\\n</think>' if m.role == 'tool' and loop.last }}", ""),
    ],
    ids=["white space", "a closed reasoning"],
)
def test_white_space_and_closed_reasonings_are_no_other_text(
    tmp_path: Path, before: str, after: str
) -> None:
    """Hermes 2 Pro's and Qwen3.5's: what is learned is the text that transformers renders."""
    source = CHATML.replace("BEFORE", before).replace("AFTER", after)
    chat = Chat(tmp_path, source, [*TOOLS, *AND])
    whole, learned = chat.texts()
    assert learned == f"{CALLED}It is sunny.<|end|>yes.<|end|>"
    assert "think" not in whole
    assert ("sunny\n<|end|>" in whole) == bool(after)


def test_instructions_after_the_last_turn_are_not_learned(tmp_path: Path) -> None:
    """Command R+'s stand there, in conversations and prompts."""
    block = "{{- '<|begin|>system\\nUse tools.<|end|>' }}{%- if add_gen"
    source = CHATML.replace("BEFORE", "").replace("AFTER", "").replace("{%- if add_gen", block)
    whole, learned = Chat(tmp_path, source, ONE).texts()
    assert learned == "Hi you!<|end|>"
    assert whole == (
        "<|begin|>user\nHello there<|end|><|begin|>system\nUse tools.<|end|>"
        "<|begin|>assistant\nHi you!<|end|>"
    )


def test_a_call_of_which_more_is_written_before_its_result_is_learned_whole(tmp_path: Path) -> None:
    more = "{{- ' #1' if m.tool_calls and not loop.last }}"
    source = CHATML.replace("BEFORE", "").replace("AFTER", more)
    _, learned = Chat(tmp_path, source, TOOLS).texts()
    assert learned == CALLED.replace("<|end|>", " #1<|end|>") + "It is sunny.<|end|>"


def test_a_call_that_nothing_ends_is_named(tmp_path: Path) -> None:
    """Command R+'s goes on with the next turn at once; its other answers end."""
    source = CHATML.replace("BEFORE", "").replace("AFTER", "")
    for name in ("ended", "open", "without"):
        (tmp_path / name).mkdir()
    assert Chat(tmp_path / "ended", source, TOOLS).warnings() == []
    open_ended = source.replace("{{- '<|end|>' }}", "{{- '\\n' if m.tool_calls else '<|end|>' }}")
    (line,) = Chat(tmp_path / "open", open_ended, TOOLS).warnings()
    assert "1 sample has calls that the chat template does not end" in line
    assert Chat(tmp_path / "without", open_ended, ONE).warnings() == []


def test_a_system_before_a_first_answer_is_not_learned(tmp_path: Path) -> None:
    """DBRX's writes a system's text with the first turn, so its prompt alone lacks it."""
    source = """
    {%- for m in messages if m.role != 'system' %}
        {%- if loop.first %}{{- messages[0].content + '\\n' }}{%- endif %}
        {{- '<|begin|>' + m.role + '\\n' + m.content + '<|end|>' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{%- endif %}"""
    _, learned = Chat(tmp_path, source, [BRIEF, ONE[1], *AND]).texts()
    assert learned == "Hi you!<|end|>yes.<|end|>"


REFUSED = {
    "a task around the conversation": (
        "{%- for role in ('user', 'bot') %}{%- if loop.first or messages[-1].role != 'user' %}"
        "<|begin|>user<|stop|>Judge the last {{ messages[-1].role }}:"
        "{%- for m in messages %}{{- ' ' + m.content }}{%- endfor %}"
        "<|end|><|begin|>bot<|stop|>{%- endif %}{%- endfor %}"
    ),
    "words that a prompt adds": CHATML.replace("BEFORE", "")
    .replace("AFTER", "")
    .replace("assistant\\n' }}{%- endif", "assistant\\nMy steps:\\n' }}{%- endif"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_prompt_that_is_another_task_is_refused(tmp_path: Path, kind: str) -> None:
    """Llama Guard's asks about a conversation, Apriel 1.6's prompt begins the answer."""
    with pytest.raises(ConversationError) as caught:
        Chat(tmp_path, REFUSED[kind], ONE, "accept").texts()
    assert "turn 2" in str(caught.value)


LATE = """
{%- for m in messages %}
    {{- '<|user|>' if m.role == 'user' else '<|bot|>' }}{{- m.content }}
    {%- if not loop.last and m.role == 'assistant' %}END{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>' }}{%- endif %}
"""


@pytest.mark.parametrize(("end", "stop"), [("", "<|user|>"), ("<|stop|>", "<|stop|>")])
def test_an_end_before_another_turn_ends_the_last_answer_too(
    tmp_path: Path, end: str, stop: str
) -> None:
    """GLM's models stop at the token of the user's turn, Hy3's template ends all but the last."""
    source = LATE.replace("END", end)
    chat = Chat(tmp_path, source, SEVERAL, stops=(stop,))
    whole, learned = chat.texts()
    assert learned == f"yes, größe{stop} no {stop}yes, größe{stop}"
    assert whole.endswith(stop)
    assert chat.warnings() == []
    assert Chat(tmp_path, source, SEVERAL).texts()[1].endswith("größe")
    (line,) = Chat(tmp_path, source, SEVERAL).warnings()
    assert "does not end answers" in line


def test_a_call_that_only_a_null_text_lets_through_is_learned(tmp_path: Path) -> None:
    """DeepSeek R1's writes calls only then."""
    source = CHATML.replace("m.tool_calls", "m.content is none", 1)
    source = source.replace("BEFORE", "").replace("AFTER", "")
    for content in ("", None):
        turns = [TOOLS[0], {**CALLS, "content": content}, *TOOLS[2:]]
        assert Chat(tmp_path, source, turns).texts()[1] == f"{CALLED}It is sunny.<|end|>"


def test_a_template_that_reads_parts_of_a_text_gets_them(tmp_path: Path) -> None:
    """SmolVLM's and Idefics3's."""
    source = CHATML.replace("AFTER", "").replace(
        "BEFORE{{- m.content }}",
        "{%- for part in m.content %}{{- part.text if part.type == 'text' }}{%- endfor %}",
    )
    chat = Chat(tmp_path, source, [BRIEF, *ONE])
    assert chat.texts()[1] == "Hi you!<|end|>"
    assert "Be brief please." in chat.prompt()


def test_what_a_template_does_not_write_is_named(tmp_path: Path) -> None:
    source = CHATML.replace("m.tool_calls", "false", 1).replace("BEFORE", "").replace("AFTER", "")
    with pytest.raises(ConversationError, match="omits the call of 'weather' in turn 2; make"):
        Chat(tmp_path, source, TOOLS).texts()
