"""`launch completion`: the script that teaches a shell to complete commands and names."""

from __future__ import annotations

import click

_WHERE = {
    "bash": 'eval "$(launch completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(launch completion zsh)"    # in ~/.zshrc',
    "fish": "launch completion fish | source    # in ~/.config/fish/config.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_WHERE)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(launch completion bash)"   # in ~/.bashrc
    eval "$(launch completion zsh)"    # in ~/.zshrc
    launch completion fish | source    # in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    root = context.find_root().command
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    script = found(root, {}, "launch", "_LAUNCH_COMPLETE")
    click.echo(script.source_template % script.source_vars())
