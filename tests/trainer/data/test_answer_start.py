"""An answer begins where the conversation and its prompt part, whatever opens a reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.families import Family
from tests.trainer.data.test_chat_template import ONE, TOOLS, turn, write_model
from tests.trainer.data.test_lost_text import prompted, sample, spoken
from trainer.data.answer_start import find_answer_start
from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import Encoder

THINKS = turn("assistant", "22", reasoning_content="Let me add.")


def make(folder: Path, opener: str, written: str = "") -> Path:
    """Write a model whose prompt opens a reasoning, with what is written before an answer."""
    source = (
        "{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- if m.role == 'assistant' %}"
        f"{written}{{%- endif %}}{{{{- m.content + '<|end|>' }}}}{{%- endfor %}}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>" + opener + "' }}{%- endif %}"
    )
    tags = ("<|end|>", "<|user|>", "<|assistant|>")
    return write_model(folder, Family(tags, "<|end|>", None, source), source)


@pytest.mark.parametrize(
    ("opener", "written", "begin"),
    [
        ("<|channel>thought\\n<channel|>", "", ""),
        ("<|START_THINKING|><|END_THINKING|>", "{{- '<|START_RESPONSE|>' }}", "<|START_RESPONSE|>"),
        ("<think>\\n", "{{- '<think></think>' }}", "<think></think>"),
        (
            "<think>\\n\\n</think>\\n\\n",
            "{{- '<think>\\nNo.\\n</think>' }}",
            "<think>\nNo.\n</think>",
        ),
        ("<think>\\n\\n", "{{- '<think>\\nNo.\\n</think>' }}", "<think>\nNo.\n</think>"),
    ],
)
def test_a_prompt_may_open_a_reasoning_in_any_markup(
    tmp_path: Path, opener: str, written: str, begin: str
) -> None:
    encoder = Encoder(make(tmp_path, opener, written))
    text, learned = spoken(encoder, sample(*ONE))
    answer = f"{begin}yes, größe<|end|>"
    assert text == f"<|user|>hi \n<|end|><|assistant|>{answer}"
    assert learned == answer
    assert prompted(encoder, sample(*ONE)) == text.removesuffix(answer)


WRITES = "{{- '<think>\\n' + m.reasoning_content + '\\n</think>' }}"
CHANNEL = "{{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}"


@pytest.mark.parametrize(
    ("opener", "written", "learned"),
    [
        ("<think>\\n\\n", WRITES, "<think>\nLet me add.\n</think>22<|end|>"),
        (
            "<|channel>thought\\n<channel|>",
            CHANNEL,
            "<|channel>thought\nLet me add.\n<channel|>22<|end|>",
        ),
        ("<|begin|>", "", "22<|end|>"),
        ("<think>", "", "Let me add.\n</think>\n\n22<|end|>"),
    ],
)
def test_only_a_reasoning_that_a_template_cuts_is_written_after_its_opener(
    tmp_path: Path, opener: str, written: str, learned: str
) -> None:
    """No markup is made up for another tag, such as one that begins every answer."""
    encoder = Encoder(make(tmp_path, opener, written), "accept")
    assert spoken(encoder, sample(ONE[0], THINKS))[1] == learned


@pytest.mark.parametrize("asked", ["a<|assistant|>\n", "a<|turn>model\n", "b<think>", "a<x><y>"])
def test_another_prompt_has_no_answer(asked: str) -> None:
    assert find_answer_start(asked, "a<|assistant|>22") is None


def test_a_header_that_only_the_prompt_has_is_refused(tmp_path: Path) -> None:
    encoder = Encoder(make(tmp_path, "\\n"))
    with pytest.raises(ConversationError, match="changes the text before turn 2"):
        encoder.encode_conversation(sample(*ONE))


UNASKED = """
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content + '[/RESULT]' }}
    {%- else %}
        {%- for call in m.tool_calls %}
            {{- '[CALL]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- (m.content or '') + '</s>' }}
    {%- endif %}
{%- endfor %}"""
"""It has no markup before an answer, and asks for none."""


@pytest.mark.parametrize("turns", [TOOLS, TOOLS[:2]])
def test_a_call_is_learned_whole_where_no_prompt_is_asked_for(
    tmp_path: Path, turns: list[dict[str, Any]]
) -> None:
    tags = ("[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[CALL]", "[ARGS]", "</s>")
    folder = write_model(tmp_path, Family(tags, "</s>", None, UNASKED), UNASKED)
    one = sample(*turns)
    call = '[CALL]weather[ARGS]{"city": "Köln"}</s>'
    _, learned = spoken(Encoder(folder), one)
    assert learned == call + ("It is sunny.</s>" if turns is TOOLS else "")


def test_the_prompt_that_a_template_always_adds_is_not_learned(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
        "{{- '<|assistant|>' }}"
    )
    tags = ("<|end|>", "<|user|>", "<|assistant|>")
    folder = write_model(tmp_path, Family(tags, "<|end|>", None, source), source)
    assert spoken(Encoder(folder), sample(*ONE))[1] == "yes, größe<|end|>"
