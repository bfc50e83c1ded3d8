"""The command that prints a shell's completion script, for both programs."""

from __future__ import annotations

import click

_SHELLS = ("bash", "zsh", "fish")
_END_OF_BASH = "    return 0\n"
_NO_BLANK = """    [[ "${COMPREPLY-}" == *= ]] && compopt -o nospace
"""
"""After `training.epochs=` a value follows without a space; click's script does not know that."""
_HELP = """Print the completion script of a shell.

\b
eval "$({0} completion bash)"   # in ~/.bashrc
eval "$({0} completion zsh)"    # in ~/.zshrc
{0} completion fish | source    # in ~/.config/fish/config.fish
"""


def _make_completion_command(program: str) -> click.Command:
    """Return the command `completion` of a program."""

    @click.command("completion", help=_HELP.format(program))
    @click.argument("shell", type=click.Choice(_SHELLS))
    @click.pass_context
    def completion(context: click.Context, shell: str) -> None:
        from click.shell_completion import get_completion_class

        found = get_completion_class(shell)
        root = context.find_root().command
        if found is None:
            raise click.UsageError(f"no completion for {shell}")
        script = found(root, {}, program, f"_{program.upper()}_COMPLETE")
        text = script.source_template % script.source_vars()
        if shell == "bash":
            text = text.replace(_END_OF_BASH, _NO_BLANK + _END_OF_BASH)
        click.echo(text)

    return completion


launch, trainer = map(_make_completion_command, ("launch", "trainer"))
