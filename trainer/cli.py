"""The `trainer` program: one lazily imported command a file in `trainer.commands`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from trainer import __version__
from trainer.system.commandline.lazy_group import LazyGroup
from trainer.system.commandline.sanitize import sanitize_text
from trainer.system.commandline.streams import end_output, print_any_text
from trainer.system.commandline.wrapping import LogFormatter
from trainer.system.errors import (
    DoesNotFitError,
    InputError,
    TrainerError,
    describe_host_fault,
    is_out_of_memory,
)
from trainer.system.process.native_thread import exit_process

COMMANDS = {
    "autotune": (
        "trainer.commands.autotune:autotune",
        "Find a GPU's fastest kernels, once for each card and driver.",
    ),
    "cache": ("trainer.commands.cache:cache", "Show or empty the cache of derived model data."),
    "chat": ("trainer.commands.chat:chat", "Chat with a model, checkpoint or adapter."),
    "completion": ("trainer.system.commandline.completion:trainer", "Print shell completion."),
    "distill": ("trainer.commands.distill:distill", "Train a small model on a big one's logits."),
    "evaluate": (
        "trainer.commands.evaluate:evaluate",
        "Score a model, checkpoint or adapter on data.",
    ),
    "finetune": (
        "trainer.commands.finetune:finetune",
        "Fine-tune a model: alone, as coordinator, or as worker.",
    ),
    "generate": (
        "trainer.commands.generate:generate",
        "Continue texts with a model, checkpoint or adapter.",
    ),
    "generate-data": (
        "trainer.commands.generate_data:generate_data",
        "Generate training data.",
    ),
    "init-model": (
        "trainer.commands.init_model:init_model",
        "Make a small Qwen3 with a tokenizer trained on your data.",
    ),
    "inspect-data": (
        "trainer.commands.inspect_data:inspect_data",
        "Show the contents of a data file, and what is learned of it.",
    ),
    "lab": ("trainer.commands.lab:lab", "Show one technique each with its measured figures."),
    "merge": ("trainer.commands.merge:merge", "Write a LoRA adapter into its base model."),
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="%(version)s")
def trainer() -> None:
    """Fine-tune language models on whatever computers you have."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(sys.stderr))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for client in ("httpx", "httpx2"):  # the hub's, which tell every request
        logging.getLogger(client).setLevel(logging.WARNING)


def main() -> None:
    """Run the program; errors for people are one line and an exit code (see errors.py)."""
    print_any_text()
    try:
        # Not standalone, click returns what a command gave to `Context.exit`; it raises nothing.
        code = trainer.main(prog_name="trainer", standalone_mode=False)
        sys.stdout.flush()
        exit_process(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        from trainer.config.usage import usage_line

        _end(usage_line(error, sys.argv[1:], _list_setting_keys), InputError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        exit_process(130)
    except TrainerError as error:
        _end(str(error), error.exit_code, error.details)
    except Exception as error:
        if fault := describe_host_fault(error):
            end_output()
            _end(fault, InputError.exit_code)
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split()) or type(error).__name__  # torch's has several lines
        _end(
            f"this host has not enough memory ({message}); lower training.micro_batch_size or"
            " data.max_seq_len, use method lora, or stop other programs",
            DoesNotFitError.exit_code,
        )


def _end(message: str, code: int, details: Sequence[str] = ()) -> NoReturn:
    for line in (message, *details):
        print(f"trainer: {sanitize_text(line)}", file=sys.stderr)  # noqa: T201 - the one error boundary
    exit_process(code)


def _list_setting_keys(options: list[str]) -> list[str]:
    from trainer.config.run import setting_keys

    return setting_keys() if "--set" in options else []


if __name__ == "__main__":
    main()
