"""A conversation with a model: in a terminal, through a pipe, and in one call."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
from datetime import date
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.trainer import small_model as small
from tests.waiting import PATIENCE, wait_for
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.chat import chat
from trainer.commands.evaluate import evaluate
from trainer.commands.generate import generate
from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.evaluate.conversation import Conversation
from trainer.evaluate.generation import TextModel, complete_samples
from trainer.replica.backend import Compute
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError

CPU = Compute("cpu", threads=1)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversation")
    return small.write_model(folder / "model", small.write_data(folder / "data.jsonl"))


def with_files(model: Path, folder: Path, **files: Any) -> Path:
    """Return a copy of a model folder with other JSON files, by their names without `.json`."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "manifest.json":
            (folder / file.name).write_bytes(file.read_bytes())
    for name, tree in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **tree}))
    return folder


def turns(*texts: str) -> tuple[ChatMessage, ...]:
    roles = ("user", "assistant")
    return tuple(ChatMessage(roles[index % 2], text) for index, text in enumerate(texts))


@pytest.mark.parametrize("backend", ["cpu", "wgpu"])
def test_each_answer_continues_all_turns_before_it(
    request: pytest.FixtureRequest, model: Path, backend: Any
) -> None:
    if backend == "wgpu":
        request.getfixturevalue("vulkan")
    sampling = Sampling(temperature=1.0, seed=4)
    conversation = Conversation(load_trained(model), 6, sampling, "be brief")
    conversation.open_model(Compute(backend, threads=1))
    generator: Any = conversation.model._generator
    assert (generator._batch if backend == "wgpu" else generator.batch) == 1, "one has memory"
    said: list[str] = []
    for number, text in enumerate(("echo", "rm -rf", "ls")):
        pieces: list[str] = []

        def show(new: str, pieces: list[str] = pieces) -> bool:
            pieces.append(new)
            return False

        answer = conversation.answer_turn(text, show)
        assert "".join(pieces) == answer.text
        assert len(pieces) >= answer.tokens, "one call a token"
        said.append(text)
        messages = (ChatMessage("system", "be brief"), *turns(*said))
        drawn = Sampling(temperature=1.0, seed=4 + 2 * number)
        (alone,) = complete_samples(
            load_trained(model), [Sample("", messages=messages)], 6, drawn, CPU
        )
        assert alone == answer
        said.append(answer.text)
    conversation.reset_turns()
    fresh = conversation.answer_turn("echo", lambda _: False)
    assert "rm -rf" not in fresh.prompt
    assert "be brief" in fresh.prompt


def test_an_answer_that_is_stopped_stays_in_the_conversation(model: Path) -> None:
    conversation = Conversation(load_trained(model), 50, Sampling())
    conversation.open_model(CPU)
    seen: list[str] = []

    def stop_at_three(new: str) -> bool:
        seen.append(new)
        return len(seen) == 3

    answer = conversation.answer_turn("echo", stop_at_three)
    assert answer.tokens == 3
    assert not answer.ended
    assert answer.text in conversation.answer_turn("ls", lambda _: True).prompt


def test_a_conversation_that_is_too_long_says_so(model: Path, tmp_path: Path) -> None:
    small_context = with_files(model, tmp_path / "m", config={"max_position_embeddings": 48})
    conversation = Conversation(load_trained(small_context), 512, Sampling())
    conversation.open_model(CPU)
    assert conversation.answer_turn("a", lambda _: False).tokens <= 48
    with pytest.raises(InputError, match="tokens, and 48 are allowed; start another with /reset"):
        conversation.answer_turn("b" * 48, lambda _: False)
    conversation.reset_turns()
    conversation.answer_turn("c", lambda _: False)


def test_an_answer_of_a_tokenizer_without_markup_ends_where_a_user_speaks(
    model: Path, tmp_path: Path
) -> None:
    """The layout is `user: ...` then, and no token ends an answer."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    plain = TextModel(load_trained(with_files(model, tmp_path / "m", tokenizer=tokenizer)))
    assert plain.encoder.next_turn == "\nuser: "

    class Forced:
        """Gives these tokens, as far as it is not told to end."""

        device = "forced"

        def generate(self, prompts: Any, *, until: Any, **_: Any) -> list[list[int]]:
            tokens = plain.encoder.tokenizer.encode("a b\nc\nuser: d\n").ids
            made: list[int] = []
            for token in tokens:
                made.append(token)
                if until is not None and until(0, made):
                    break
            return [made]

    forced: Any = Forced()
    plain.open_generator(9, 9, CPU, lambda _: (forced, ""))
    for sample, text in (
        (Sample("", messages=turns("x")), "a b\nc"),
        (Sample("x"), "a b\nc\nuser: d\n"),
    ):
        (found,) = plain.complete_prompts([sample], plain.encode([sample]), 9, Sampling())
        assert found.text == text
        assert found.ended == bool(sample.messages)


def test_one_turn_in_one_call_uses_the_template(model: Path, tmp_path: Path) -> None:
    folder = with_files(model, tmp_path / "m", tokenizer_config={"chat_template": TEMPLATE})
    data = tmp_path / "asked.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "echo"}]}\n')
    flags = ["--max-new-tokens", "5", "--gpu-backend", "cpu", "--threads", "1", "--json"]
    found: list[Any] = []
    for words in (["--chat", "echo"], ["--data", str(data)]):
        result = click.testing.CliRunner().invoke(generate, [str(folder), *words, *flags])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    assert found[0] == found[1]
    assert found[0]["prompt"] == "<|im_start|>user\necho<|im_end|>\n<|im_start|>assistant\n"


def test_lines_of_a_pipe_are_turns(model: Path) -> None:
    command = [str(model), "--max-new-tokens", "4", "--gpu-backend", "cpu", "--threads", "1"]
    runner = click.testing.CliRunner()
    twice = runner.invoke(chat, command, input="echo é\r\n\n/reset\necho é\n")
    assert twice.exit_code == 0, twice.output
    once = runner.invoke(chat, command, input="echo é")
    assert twice.stdout == once.stdout * 2
    assert f"chatting with {model} on cpu\n" in twice.stderr
    broken = runner.invoke(chat, command, input=b"echo\n\xff\n")
    assert str(broken.exception) == "line 2 of the standard input is not UTF-8"


def test_what_is_not_used_is_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the tokenizer and of the data, by each command that reads them."""
    folder = with_files(model, tmp_path / "m", tokenizer_config={"split_tokens": True})
    data = tmp_path / "a.jsonl"
    data.write_text('{"messages": [{"role": "assistant", "content": "a"}], "lable": 1}\n')
    flags = ["--gpu-backend", "cpu", "--threads", "1"]
    for command in (generate, evaluate):
        caplog.clear()
        with caplog.at_level("INFO"):
            result = click.testing.CliRunner().invoke(
                command, [str(folder), "--data", str(data), *flags]
            )
        assert result.exit_code == 0, result.output
        assert "not used: 'split_tokens' (1 time)" in caplog.text
        assert "not used: 'lable' (1 time)" in caplog.text


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self._process, self._screen = pty.fork()
        if self._process == 0:
            os.execv(command[0], command)
        self.seen = ""

    def read(self) -> None:
        """Wait for more on the screen."""
        assert select.select([self._screen], [], [], PATIENCE)[0], f"only {self.seen!r}"
        self.seen += os.read(self._screen, 4096).decode(errors="replace")

    def until(self, text: str) -> None:
        """Wait for a text on the screen, and forget what came before it."""
        while text not in self.seen:
            self.read()
        self.seen = self.seen.partition(text)[2]

    def waits(self) -> None:
        """Wait until the program waits: readline takes a signal before that only with a key."""
        status = Path(f"/proc/{self._process}/stat")
        wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "S", "a prompt")

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def end(self) -> int:
        """Return the exit code."""
        _, status = os.waitpid(self._process, 0)
        os.close(self._screen)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.long
def test_a_person_in_a_terminal(model: Path) -> None:
    command = [sys.executable, "-m", "trainer.cli", "chat", str(model), "--gpu-backend", "cpu"]
    # This model's likeliest token is a line end; 4000 drawn ones contain what looks like a prompt.
    options = ["--threads", "1", "--max-new-tokens", "4000", "--temperature", "0"]
    terminal = Terminal(*command, *options)
    terminal.until("Ctrl-D all")
    terminal.until("> ")
    terminal.type("echo\n")
    terminal.until("echo\r\n")
    terminal.until("\r\n\r\n")  # it streams line ends: 4000 tokens take longer
    terminal.type("\x03")
    terminal.until("\r\n> ")
    terminal.waits()
    terminal.type("\x03")  # nothing to stop: another line
    terminal.until("> ")
    terminal.type("/reset\n")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_a_conversation_has_the_date_of_today_and_a_completion_that_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Today(date):
        @classmethod
        def today(cls) -> date:
            return date(2031, 2, 3)

    monkeypatch.setattr("trainer.evaluate.conversation.date", Today)
    dated = f"{{{{ strftime_now('%d.%m.%Y') }}}}{TEMPLATE}"
    files = {"tokenizer_config": {"chat_template": dated}}
    trained = load_trained(with_files(model, tmp_path / "m", **files))
    for each, shown in (
        (Conversation(trained, 4, Sampling()).model, "03.02.2031"),
        (TextModel(trained), "26.07.2024"),
    ):
        (prompt,) = each.encode([Sample("", messages=turns("echo"))])
        text = each.encoder.tokenizer.decode(prompt, skip_special_tokens=False)
        assert text.startswith(shown)
