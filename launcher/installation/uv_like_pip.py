"""uv with the package indexes of pip: `python uv_like_pip.py pip install ...`.

uv reads nothing of pip's configuration, and this is the one place that translates it. Addresses go
into uv's environment, never into its arguments: they may hold a password. Variables of uv's own
that are set already win. Standard library only: hosts and `make setup` run it.
"""

from __future__ import annotations

import ast
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Settings passed to uv: pip's name of each, and the variable that uv reads."""


def read_settings(listing: str) -> dict[str, str]:
    """Return the settings of `pip config list`: the environment wins over files, as with pip."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found and (name in VARIABLES or name == "no-index"):
            found[section][name] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return uv's variables for these settings of pip."""
    found = {
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_COMPILE_BYTECODE_TIMEOUT": "600",  # of one file, on a machine that has much else to do
    }
    for name, value in settings.items():
        if name in VARIABLES:
            between = "," if name == "find-links" else " "
            found[VARIABLES[name]] = between.join(value.split())
    if "extra-index-url" in settings:
        # As pip does: every index is asked. The lock's hashes say which files are the right ones.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if "SSL_CERT_FILE" not in found and ssl.get_default_verify_paths().cafile:
        found["UV_SYSTEM_CERTS"] = "1"
    return found


def pip_settings() -> dict[str, str]:
    """Return how pip is configured on this machine."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    return read_settings(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def cache_fails() -> bool:
    """Whether uv could not keep a cache, which it takes for an error: a home that is not there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return not os.access(there, os.W_OK)


def main() -> None:
    """Replace this process by the uv next to this Python."""
    settings = pip_settings()
    arguments = sys.argv[1:]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")  # uv has no variable for it
    variables = {**uv_variables(settings), **({"UV_NO_CACHE": "1"} if cache_fails() else {})}
    program = str(Path(sys.executable).with_name("uv"))
    os.execve(program, ["uv", *arguments], {**variables, **os.environ})  # noqa: S606 - no shell


if __name__ == "__main__":
    main()
