"""The `trainer` program: one lazily imported command a file in `trainer.commands`."""

from __future__ import annotations

import importlib
import logging
import sys

import click

from trainer.errors import TrainerError

COMMANDS = {
    "autotune": "Find a GPU's fastest kernels, once a card and driver.",
    "evaluate": "Score a model, checkpoint or adapter on a JSON Lines file.",
    "finetune": "Fine-tune a model: alone, as coordinator, or as worker.",
    "generate": "Continue texts with a model, checkpoint or adapter.",
    "generate-data": "Write training data that Motley can generate.",
    "init-model": "Make a small Qwen3 with a tokenizer trained on your data.",
    "merge": "Write a LoRA adapter into its base model.",
}


class Commands(click.Group):
    """Lists commands from their one-line summaries and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands' names."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return getattr(importlib.import_module(f"trainer.commands.{name}"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="motley", message="%(version)s")
def trainer() -> None:
    """Fine-tune language models on whatever computers you have."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def main() -> None:
    """Run the program; errors for people are one line and an exit code (see errors.py)."""
    try:
        # Not standalone, click returns what a command gave to `Context.exit`; it raises nothing.
        code = trainer(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "trainer"
        message = f"trainer: {error.format_message()} (see: {path} --help)"
        print(message, file=sys.stderr)  # noqa: T201 - the one error boundary
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except TrainerError as error:
        print(f"trainer: {error}", file=sys.stderr)  # noqa: T201 - the one error boundary
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
