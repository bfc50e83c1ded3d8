"""Published tokenizers: ids, learned tokens, prompts and ends are those of `AutoTokenizer`."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers

from tests.real.conftest import folder_of
from tests.real.packages import TOKENIZERS
from trainer.data.chat_marks import ConversationError
from trainer.data.documents import Documents
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.samples import read_samples
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.distill.tokenizer.trim import trim_to_size
from trainer.distill.tokenizer.vocabulary import Vocabulary
from trainer.model.gguf.conversion import convert_gguf

pytestmark = pytest.mark.real

TURN_ENDS = {
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "smollm2": "<|im_end|>",
}
"""What ends an assistant's turn in each publisher's template."""
STOPS = {name: {end} for name, end in TURN_ENDS.items()} | {
    "llama3": {"<|eot_id|>", "<|end_of_text|>"},
    "gptoss": {"<|return|>"},
    "gpt2": {"<|endoftext|>"},
    "llama2": {"</s>"},
}
CODE = "def f(x):\n    if x:\n\n        return  1\n\n\n\treturn 2\n"
TEXTS = (
    "Hello world",
    "  leading and   runs \t\t tabs\n\n\n   x ",
    "12345 3.14159 2026-11-25 ٣٤٥ ① ½ x²",
    CODE,
    "naïve café e\u0301 Åland ﬁ don't I'LL we'RE",
    "日本語テキスト 中文 한국어 עברית العربية हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🇩🇪 x \u200b\u00a0\ufeff\u2028x\r\n\r\x00\x01\x7f",
    "<|im_end|> <|endoftext|> </s> <s> <think> <bos> <end_of_turn> <｜end▁of▁sentence｜>",
    "a" * 300,
    "",
)


@pytest.fixture
def folder(name: str, request: pytest.FixtureRequest) -> Path:
    if name == "smollm2":
        return convert_gguf(request.getfixturevalue("smollm2_gguf"))
    return folder_of(TOKENIZERS[name]) / "package" / "models"


@cache
def ours(folder: Path) -> Encoder:
    return Encoder(folder)


@cache
def theirs(folder: Path) -> Any:
    """Return the tokenizer of transformers.

    Its class for Llama 2 does not use the splitting of tokenizer.json, which is SentencePiece's.
    """
    auto: Any = transformers.AutoTokenizer.from_pretrained(folder)
    if type(auto).__name__ == "LlamaTokenizer":
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return auto


def sample(turns: list[dict[str, str]]) -> Sample:
    return Sample("", messages=tuple(ChatMessage(t["role"], t["content"]) for t in turns))


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


CONVERSATIONS = {
    "one answer": turns("Hello", "Hi!"),
    "white space in an answer": turns(TEXTS[5], CODE + "    # end"),
    "emoji and numbers": turns(TEXTS[2], TEXTS[6].replace("\x00", "")[:40] + "z"),
    "several answers": turns("a", "first one", "b", "second\n\n  one", "c", "third one"),
    "a system's turn": [{"role": "system", "content": "Be brief."}, *turns("Hello", "Hi!")],
}


@pytest.mark.parametrize("name", STOPS)
def test_ids_and_ends(folder: Path, name: str) -> None:
    encoder, judge = ours(folder), theirs(folder)
    for text in TEXTS:
        expected = judge(text, truncation=False)["input_ids"]
        assert encoder.encode_texts([Sample(text)]) == [expected], text
    added = encoder.tokenizer.get_added_tokens_decoder()
    assert {token.content: number for number, token in added.items()} == judge.get_added_vocab()
    assert encoder.end == judge.eos_token_id
    assert {encoder.tokenizer.id_to_token(end) for end in encoder.stops} == STOPS[name]
    assert encoder.unused == []


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", TURN_ENDS)
def test_conversations(folder: Path, name: str, case: str) -> None:
    """An answer is learned from behind the prompt to behind the token that ends its turn."""
    encoder, judge, said = ours(folder), theirs(folder), CONVERSATIONS[case]
    text: str = judge.apply_chat_template(said, tokenize=False)
    encoded = judge(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False)
    ids, labels = encoder.encode_conversation(sample(said))
    assert ids == judge.apply_chat_template(said, return_dict=False) == encoded["input_ids"]
    spans: list[tuple[int, int]] = []
    for number, turn in enumerate(said):
        if turn["role"] != "assistant":
            continue
        asked: str = judge.apply_chat_template(
            said[:number], tokenize=False, add_generation_prompt=True
        )
        answer = text.index(turn["content"].strip(), len(asked)) + len(turn["content"].strip())
        end = text.index(TURN_ENDS[name], answer) + len(TURN_ENDS[name])
        assert text.startswith(asked)
        spans.append((len(asked), end))
    learned = "".join(text[begin:end] for begin, end in spans)
    targets = [label for label in labels if label != IGNORED]
    assert encoder.tokenizer.decode(targets, skip_special_tokens=False) == learned
    expected = judge.apply_chat_template(said[:-1], add_generation_prompt=True, return_dict=False)
    assert (
        encoder.encode_prompt(sample(said)) == encoder.encode_prompt(sample(said[:-1])) == expected
    )


def calls(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Says <how> it is & will be.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]
ASKED, ANSWER = turns("Weather in Köln?", "It is sunny.")
FOUND = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "sunny"}
KOELN = {"city": "Köln"}
RICH: dict[str, list[dict[str, Any]]] = {
    "a call": [ASKED, calls(KOELN), FOUND, ANSWER],
    "a call of text": [ASKED, calls(json.dumps(KOELN)), FOUND, ANSWER],
    "a call after a system": [
        *CONVERSATIONS["a system's turn"],
        ASKED,
        calls(KOELN),
        FOUND,
        ANSWER,
    ],
    "a call at the end": [ASKED, calls(KOELN)],
    "a thought": [ASKED, {**ANSWER, "reasoning_content": "Let me see."}],
    "thoughts": [ASKED, {**ANSWER, "reasoning_content": "Hm."}] * 2,
    "a thought before a call": [ASKED, calls(KOELN, reasoning_content="Hm."), FOUND, ANSWER],
}


@pytest.mark.parametrize("case", RICH)
@pytest.mark.parametrize("name", TURN_ENDS)
def test_calls_and_thoughts(folder: Path, name: str, case: str, tmp_path: Path) -> None:
    """A template writes as in transformers; a call that it drops is refused."""
    said, judge = RICH[case], theirs(folder)
    line: dict[str, Any] = {"messages": said}
    if has_call := "call" in case:
        line["tools"] = TOOLS
    (tmp_path / "line.jsonl").write_text(json.dumps(line))
    (sample,) = read_samples(tmp_path / "line.jsonl", "causal-lm")
    plain = [
        {**turn, "tool_calls": calls(KOELN)["tool_calls"]} if "tool_calls" in turn else turn
        for turn in said
    ]
    encoder = Encoder(folder, "accept")
    try:
        text: str = judge.apply_chat_template(plain, tools=line.get("tools"), tokenize=False)
    except jinja2.TemplateError:
        text = ""
    if not text or (has_call and '"Köln"' not in text):
        assert has_call
        assert name != "qwen3"
        if name == "deepseek_v3":  # it writes calls only beside a null text, which is then given
            ids, _ = encoder.encode_conversation(sample)
            assert '"Köln"' in encoder.tokenizer.decode(ids, False)
            return
        with pytest.raises(ConversationError):
            encoder.encode_conversation(sample)
        return
    ids, labels = encoder.encode_conversation(sample)
    assert ids == judge(text, add_special_tokens=False, truncation=False)["input_ids"]
    learned = encoder.tokenizer.decode([n for n in labels if n != IGNORED], False)
    answers = [turn for turn in said if turn["role"] == "assistant"]
    assert learned.count(TURN_ENDS[name]) == len(answers)
    assert learned.endswith(TURN_ENDS[name])
    assert ('"Köln"' in learned) == has_call
    assert (answers[-1].get("reasoning_content", "") in learned) or name != "qwen3"
    assert ASKED["content"] not in learned


@pytest.mark.parametrize("name", TURN_ENDS)
def test_plain_text_forges_no_markup(folder: Path, name: str) -> None:
    encoder, end = ours(folder), TURN_ENDS[name]
    number = encoder.tokenizer.token_to_id(end)
    assert number is not None
    plain, _ = encoder.encode_conversation(sample(turns("a b", "c d")))
    forged = turns(f"a {end} b", f"c {end} d")
    ids, labels = encoder.encode_conversation(sample(forged))
    assert ids.count(number) == plain.count(number)
    assert len(ids) > len(plain) + 4
    assert labels.count(number) == 1
    text = theirs(folder).apply_chat_template(forged, tokenize=False)
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_it_can_be_trimmed(folder: Path, name: str, tmp_path: Path) -> None:
    """SmolLM2's lacks 21 of the 256 bytes."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, teacher)
    (teacher / "config.json").write_text('{"vocab_size": 151936}')
    report = trim_to_size(teacher, Documents([Path(__file__).parent]), 4000, tmp_path / "out")
    assert report.tokens == 4000
    trimmed = Encoder(tmp_path / "out")
    ids = Vocabulary.load_map(tmp_path / "out", teacher).teacher_ids
    for text in TEXTS:
        (mine,) = trimmed.encode_texts([Sample(text)])
        (whole,) = ours(folder).encode_texts([Sample(text)])
        decode = ours(folder).tokenizer.decode
        assert decode(ids[mine].tolist(), False) == decode(whole, False)
