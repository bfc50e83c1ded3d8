"""`trainer chat`: a conversation with a trained model, whose answers appear as they are made."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.commands.sampling import generation_options

if TYPE_CHECKING:
    from trainer.replica.backend import Compute
    from trainer.replica.sampling import Sampling

_RESET = "/reset"


@click.command("chat")
@click.option(
    "--system", default="", show_default=False, help="The system's turn, before the first of yours."
)
@generation_options(max_new_tokens=512)
def chat(
    model: Path,
    base: str | None,
    max_new_tokens: int,
    sampling: Sampling,
    compute: Compute,
    system: str,
) -> None:
    """Talk with MODEL: an output folder, a checkpoint, an adapter or a full model.

    Ctrl-C ends an answer, /reset begins another conversation, Ctrl-D ends. Without a terminal each
    line of the standard input is a turn.
    """
    from trainer.checkpoint.trained_model import load_trained
    from trainer.evaluate.conversation import Conversation
    from trainer.replica.backend import format_reason
    from trainer.system.errors import InputError

    trained = load_trained(model, base)
    conversation = Conversation(trained, max_new_tokens, sampling, system)
    device, reason = conversation.open_model(compute)
    talks = sys.stdin.isatty()
    keys = f"; Ctrl-C ends an answer, {_RESET} the conversation, Ctrl-D all" if talks else ""
    click.echo(f"chatting with {trained.path} on {device}{format_reason(reason)}{keys}", err=True)
    for text in _read_typed_lines() if talks else _read_piped_lines():
        if text.strip() == _RESET:
            conversation.reset_turns()
            continue
        with _catch_interrupt() as stopped:

            def show_text(new: str, stopped: Callable[[], bool] = stopped) -> bool:
                click.echo(new, nl=False)  # flushes
                return stopped()

            try:
                conversation.answer_turn(text, show_text)
                click.echo()
            except InputError as error:
                if not talks:
                    raise
                click.echo(f"trainer: {error}", err=True)


def _read_typed_lines() -> Iterator[str]:
    """Yield the lines that a person types, with the editing and history of readline."""
    with contextlib.suppress(ImportError):  # a Python may be built without
        import readline  # noqa: F401 - `input` uses it
    while True:
        try:
            text = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        except UnicodeDecodeError:
            click.echo("trainer: that is not UTF-8", err=True)
            continue
        if text.strip():
            yield text


def _read_piped_lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not blank."""
    from trainer.system.errors import InputError

    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputError(f"line {number} of the standard input is not UTF-8") from None
        if text.strip():
            yield text


@contextlib.contextmanager
def _catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield what says whether Ctrl-C was pressed; a second one ends the program."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        del frame
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
