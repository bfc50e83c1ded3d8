"""Published chat templates: texts are those of transformers, and each answer is learned alone."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.real.conftest import folder_of
from tests.real.packages import TRL
from tests.real.test_tokenizers import CONVERSATIONS, sample
from trainer.data.chat_template import ChatTemplate

pytestmark = pytest.mark.real

_TAG = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</?(?:start|end)_of_\w+>|<\|turn>|<turn\|>"
)
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
CASES = ("one answer", "several answers", "a system's turn")


def rendered(source: str, turns: list[dict[str, Any]]) -> str | None:
    """Return the text of transformers, None if the template refuses the conversation."""
    try:
        (text,), _ = render_jinja_template(conversations=[turns], chat_template=source, **TOKENS)
    except (jinja2.TemplateError, TypeError):
        return None
    return text


@pytest.mark.parametrize("case", CASES)
def test_published_templates(case: str) -> None:
    turns = CONVERSATIONS[case]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    compared = 0
    for path in sorted((folder_of(TRL) / "trl/chat_templates").glob("*.jinja")):
        source = path.read_text()
        text = rendered(source, turns)
        if text is not None and answers[0] not in text:  # it reads parts of texts
            parts = json.loads(json.dumps(turns))
            for turn in parts:
                turn["content"] = [{"type": "text", "text": turn["content"]}]
            text = rendered(source, parts)
        if text is None:
            continue
        special = frozenset(_TAG.findall(source)) | set(TOKENS.values())
        today = date.today().isoformat()  # as transformers gives it
        template = ChatTemplate({"default": source}, TOKENS, special, today=today)
        chat = template.render_conversation(sample(turns).messages, ())
        learned = [chat.text[begin:end] for begin, end in chat.learned]
        assert chat.text == text, path.name
        assert len(learned) == len(answers), path.name
        for answer, part in zip(answers, learned, strict=True):
            assert answer in part, path.name
        for turn in turns:
            if turn["role"] != "assistant" and len(turn["content"]) > 1:
                assert turn["content"] not in "".join(learned), path.name
        compared += 1
    assert compared > 60
