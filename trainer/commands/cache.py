"""`trainer cache`: show and empty what was derived from models and data."""

from __future__ import annotations

import time

import click


@click.command("cache")
@click.option("--clear", is_flag=True, help="Remove all that no process uses.")
def cache(clear: bool) -> None:
    """Show the cache: converted GGUF files, quantised weights and encoded rows of large data.

    The last used come first.

    It is MOTLEY_CACHE, else `motley` in XDG_CACHE_HOME or ~/.cache, and keeps at most
    MOTLEY_CACHE_GIB (default: 64).
    """
    from trainer.system.storage import cache_folder

    limit, before = cache_folder.cache_limit(), cache_folder.list_entries()
    kept = cache_folder.clear_cache() if clear else before
    for entry in kept:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        note = "  in use" if clear else ""
        click.echo(f"{entry.size / 1e6:10,.1f} MB  used {used}  {entry.path}{note}")
    size = sum(entry.size for entry in kept)
    if clear:
        size = sum(entry.size for entry in before) - size
    click.echo(
        f"{cache_folder.cache_root()}: {size / 1e6:,.1f} MB"
        + (" removed" if clear else f" of at most {limit / 1e6:,.0f} MB")
    )
