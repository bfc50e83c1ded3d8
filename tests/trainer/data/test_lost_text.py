"""What a template leaves out is refused with its words, or accepted; nothing is lost silently.

A prompt that opens a reasoning is the same text in training and in generation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.conversations import conversations, tool
from tests.trainer.data.families import FAMILIES, Family, r1
from tests.trainer.data.test_chat_template import ONE, turn, write_data, write_model
from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.chat_marks import ConversationError
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.samples import read_file
from trainer.data.shapes import Sample, parse_sample
from trainer.data.survey import check_conversations

ASK = turn("user", "17+5?")
THOUGHT = "Seventeen and three\n make twenty."
REASONED = turn("assistant", f"<think>\n{THOUGHT}\n</think>\n\n22")


def sample(*turns: dict[str, Any], **more: Any) -> Sample:
    tree = json.loads(json.dumps({"messages": list(turns), **more}))
    return parse_sample(tree, 1)


def spoken(encoder: Encoder, one: Sample) -> tuple[str, str]:
    """Return the text of a conversation, and what of it is learned."""
    ids, labels = encoder.encode_conversation(one)
    kept = [label for label in labels if label != IGNORED]
    decode = encoder.tokenizer.decode
    return decode(ids, skip_special_tokens=False), decode(kept, skip_special_tokens=False)


def prompted(encoder: Encoder, one: Sample) -> str:
    return encoder.tokenizer.decode(encoder.encode_prompt(one), skip_special_tokens=False)


def make(folder: Path, family: Family, source: str | None = None) -> Path:
    return write_model(folder, family, source or family.plain)


@pytest.mark.parametrize(
    ("family", "turns", "tools", "words"),
    [
        (r1(), [ASK, REASONED], [], "a part of turn 2, 'Seventeen and three make twenty.'"),
        (r1(), [ASK, turn("assistant", "22", reasoning_content=THOUGHT)], [], "a part of turn 2"),
        (r1("<think>\n"), [ASK, REASONED, *ONE], [], "a part of turn 2"),
        (FAMILIES["qwen3"], [ASK, REASONED, *ONE], [], "a part of turn 2"),
        (FAMILIES["phi"], [ASK, turn("assistant", "22", thinking="x y")], [], "turn 2, 'x y'"),
        (FAMILIES["phi"], ONE, [tool("clock")], "the tool 'clock'"),
        (FAMILIES["phi"], [ASK, turn("tool", "12:00"), ONE[1]], [], "turn 2, '12:00'"),
        (r1(), [turn("developer", "Be brief."), *ONE], [], "turn 1, 'Be brief.'"),
        (
            FAMILIES["llama3"],
            [
                ASK,
                turn(
                    "assistant",
                    "Let me look.",
                    tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}],
                ),
                turn("tool", "x"),
                ONE[1],
            ],
            [tool("f")],
            "a part of turn 2, 'Let me look.'",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused_or_accepted(
    tmp_path: Path, family: Family, turns: list[Any], tools: list[Any], words: str
) -> None:
    folder = make(tmp_path / "model", family)
    data = write_data(tmp_path / "a.jsonl", (turns, tools))
    one = read_file(data, "causal-lm")
    with pytest.raises(ConversationError) as caught:
        Encoder(folder).encode_conversation(one.samples[0])
    assert words in str(caught.value)
    assert "data.lost_text: accept" in str(caught.value)
    accepting = Encoder(folder, "accept")
    assert check_conversations(one, accepting)[-1] == (
        "data: the chat template leaves out text of 1 of 1 sample, which data.lost_text accepts"
    )
    transformers = pytest.importorskip("transformers", reason="the launcher-only install has none")
    judge = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tree = json.loads(data.read_text())
    for each in tree["messages"]:
        each["role"] = each["role"].replace("developer", "system")
    expected = judge.apply_chat_template(
        tree["messages"], tools=tools or None, tokenize=False, date_string="26 Jul 2024"
    )
    assert spoken(accepting, one.samples[0])[0] == expected


def test_context_may_be_cut_since_it_is_not_learned(tmp_path: Path) -> None:
    encoder = Encoder(make(tmp_path, FAMILIES["qwen3"]))
    text, learned = spoken(encoder, sample(ASK, REASONED | {"weight": 0}, *ONE))
    assert "Seventeen" not in text
    assert learned == "<think>\n\n</think>\n\nyes, größe<|im_end|>"


def test_a_reasoning_that_is_written_is_not_lost(tmp_path: Path) -> None:
    """As a key or in the text; the template trims it and puts it between its own tags."""
    encoder = Encoder(make(tmp_path, FAMILIES["qwen3"]))
    for answer in (REASONED, turn("assistant", "22", reasoning=f"\n{THOUGHT}\n")):
        _, learned = spoken(encoder, sample(ASK, answer))
        assert learned == f"<think>\n{THOUGHT}\n</think>\n\n22<|im_end|>"


@pytest.mark.parametrize(
    "answer",
    [
        REASONED,
        turn("assistant", f"{THOUGHT}\n</think>\n\n22"),
        turn("assistant", "22", reasoning_content=f"{THOUGHT}\n"),
    ],
)
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_a_reasoning_continues_a_prompt_that_opens_it(
    tmp_path: Path, answer: dict[str, Any], special: tuple[str, ...]
) -> None:
    family = r1("<think>\n")
    folder = make(tmp_path, Family(family.special + special, "</s>", "<s>", family.source))
    encoder, one = Encoder(folder), sample(*ONE, ASK, answer)
    text, learned = spoken(encoder, one)
    assert learned == f"yes, größe</s>{THOUGHT}\n</think>\n\n22</s>"
    prompt = "<s><|user|>hi \n<|assistant|>yes, größe</s><|user|>17+5?<|assistant|><think>\n"
    assert text == f"{prompt}{THOUGHT}\n</think>\n\n22</s>"
    assert prompted(encoder, one) == prompted(encoder, sample(*ONE, ASK, ONE[1])) + "<think>\n"
    ids = encoder.encode_prompt(one)
    assert encoder.encode_conversation(one)[0][: len(ids)] == ids
    for tag in special:
        number = encoder.tokenizer.token_to_id(tag)
        assert [token for token in encoder.encode_conversation(one)[0] if token == number] == [
            number
        ]


@pytest.mark.parametrize("opener", ["<think>\n", "<think>", "\n<think>\n\n</think>\n\n"])
def test_an_answer_without_a_reasoning_begins_where_prompt_and_text_part(
    tmp_path: Path, opener: str
) -> None:
    encoder, one = Encoder(make(tmp_path, r1(opener))), sample(*ONE, ASK, turn("assistant", "22"))
    text, learned = spoken(encoder, one)
    assert learned == "yes, größe</s>22</s>"
    assert prompted(encoder, one) == text.removesuffix("22</s>")
    assert prompted(encoder, sample(*ONE, ASK, turn("assistant", ""))) == prompted(encoder, one)


ALWAYS = r"""
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
"""
"""The first Llama 3: the prompt for an answer follows every conversation."""
WRITTEN = r"""
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name }}
        {{- ADD call.function.arguments }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def test_a_prompt_that_every_conversation_ends_with_is_not_learned(tmp_path: Path) -> None:
    encoder = Encoder(make(tmp_path, FAMILIES["llama3"], ALWAYS))
    _, learned = spoken(encoder, sample(*ONE, ASK, turn("assistant", "22")))
    assert learned == "yes, größe<|eot_id|>22<|eot_id|>"


@pytest.mark.parametrize("add", ["' ' +", "' ' ~"])
def test_a_template_that_writes_arguments_as_they_are_gets_json(tmp_path: Path, add: str) -> None:
    """An object cannot be added to a text, and would be printed as Python."""
    encoder = Encoder(make(tmp_path, FAMILIES["phi"], WRITTEN.replace("ADD", add)))
    for arguments in ({"city": "Köln"}, '{"city":"K\\u00f6ln"}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        _, learned = spoken(encoder, sample(ASK, turn("assistant", "", tool_calls=[call])))
        assert learned == '<call>f {"city": "Köln"}<|end|>'


def test_a_call_without_a_text_has_an_empty_one_or_none(tmp_path: Path) -> None:
    """`content` is joined to a text by some templates, and its absence tested by others."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    encoder = Encoder(make(tmp_path, FAMILIES["phi"], WRITTEN.replace("ADD", "' ' ~")))
    _, learned = spoken(encoder, sample(ASK, turn("assistant", "", tool_calls=[call])))
    assert learned == "<call>f {}<|end|>"
    with pytest.raises(ConversationError, match="the chat template refuses it"):
        encoder.encode_conversation(sample(ASK, turn("assistant", None, tool_calls=[call])))


FIRST = [turn("assistant", "Hello."), ASK, turn("assistant", "22")]


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_an_answer_before_any_question_is_one_clear_line(tmp_path: Path, name: str) -> None:
    encoder = Encoder(make(tmp_path, FAMILIES[name]))
    with pytest.raises(ConversationError) as caught:
        encoder.encode_conversation(sample(*FIRST))
    assert "the conversation begins with the assistant" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("phi", "Hello.<|end|>22<|end|>\n<|endoftext|>"),
        ("llama3", "Hello.<|eot_id|>22<|eot_id|>"),
        ("qwen3", "Hello.<|im_end|><think>\n\n</think>\n\n22<|im_end|>"),
    ],
)
def test_an_answer_before_any_question_is_learned_if_the_template_can(
    tmp_path: Path, name: str, expected: str
) -> None:
    """Some templates ask for no first turn; it begins with what asks for any other."""
    encoder = Encoder(make(tmp_path, FAMILIES[name]))
    assert spoken(encoder, sample(*FIRST))[1] == expected
    _, learned = spoken(encoder, sample(FIRST[0] | {"weight": 0}, *FIRST[1:]))
    assert learned == expected.partition(">")[2]


def test_without_a_template_a_reasoning_is_refused_and_context_not_learned(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    encoder = Encoder(tmp_path)
    with pytest.raises(ConversationError, match="has reasoning apart from the text"):
        encoder.encode_conversation(sample(ASK, turn("assistant", "22", reasoning_content="x")))
    one = sample(ASK, turn("assistant", "21", weight=0, thinking="x"), ASK, turn("assistant", "22"))
    assert spoken(encoder, one)[1] == "22<|im_end|>"


LIMITS: dict[str, dict[str, bool]] = {
    "qwen3": {},
    "llama3": {},
    "mistral": {},
    "gemma": {"systems": False, "tools": False, "reasoning": False},
    "phi": {"tools": False},
}


def runs(mask: list[int]) -> list[list[int]]:
    """Return the places of each run of ones."""
    found: list[list[int]] = []
    for place, bit in enumerate(mask):
        if bit and (place == 0 or not mask[place - 1]):
            found.append([])
        if bit:
            found[-1].append(place)
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_conversations_of_all_kinds_are_laid_out_as_by_transformers(
    tmp_path: Path, name: str
) -> None:
    """The tokens, what is learned without the turns of weight 0, the prompt of the last turn.

    The judge needs the marks `{% generation %}`: each template is used with and without them.
    """
    transformers = pytest.importorskip("transformers", reason="the launcher-only install has none")
    family, compared = FAMILIES[name], 0
    encoders = [
        Encoder(write_model(tmp_path / marks, family, source), "accept")
        for marks, source in (("with", family.marked), ("without", family.plain))
    ]
    judge = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "with")
    for line in conversations(3, 80, **LIMITS[name]):
        turns = [{k: v for k, v in each.items() if k != "weight"} for each in line["messages"]]
        one = sample(*line["messages"], **({"tools": t} if (t := line.get("tools")) else {}))
        try:
            (ids, labels), other = (encoder.encode_conversation(one) for encoder in encoders)
        except ConversationError:
            continue  # what a template refuses is the matter of other tests
        expected = judge.apply_chat_template(
            turns,
            tools=line.get("tools"),
            tokenize=True,
            return_dict=True,
            truncation=False,
            return_assistant_tokens_mask=True,
            date_string="26 Jul 2024",
            padding=False,
        )
        assert ids == expected["input_ids"]
        learned = [place for place, label in enumerate(labels) if label != IGNORED]
        answers = [each for each in line["messages"] if each["role"] == "assistant"]
        places = runs(expected["assistant_masks"])
        assert len(places) == len(answers)
        weighed = zip(places, answers, strict=True)
        assert learned == [n for run, each in weighed if each.get("weight", 1) for n in run]
        assert other == (ids, labels)
        asked = encoders[1].encode_prompt(one)
        assert ids[: len(asked)] == asked
        assert labels[len(asked) - 1] == IGNORED != labels[len(asked)]
        compared += 1
    assert compared >= 40
