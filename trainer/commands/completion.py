"""`trainer completion`: the script that teaches a shell commands, presets and settings."""

from __future__ import annotations

import click

_SHELLS = ("bash", "zsh", "fish")
_END_OF_BASH = "    return 0\n"
_NO_BLANK = """    [[ "${COMPREPLY-}" == *= ]] && compopt -o nospace
"""
"""Behind `training.epochs=` goes a value, and no blank; click's script has nothing for that."""


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(trainer completion bash)"   # in ~/.bashrc
    eval "$(trainer completion zsh)"    # in ~/.zshrc
    trainer completion fish | source    # in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    root = context.find_root().command
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    script = found(root, {}, "trainer", "_TRAINER_COMPLETE")
    text = script.source_template % script.source_vars()
    if shell == "bash":
        text = text.replace(_END_OF_BASH, _NO_BLANK + _END_OF_BASH)
    click.echo(text)
