"""The hosts of an inventory unchanged since Ansible rendered it, for read-only commands.

Ansible takes a second or more to render; `status` has five for everything. Commands
that start, stop or change anything always render it again. Inventories whose result may vary
(scripts, plugins, look-ups) and those that hold secrets are never cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launcher.files import default_state_folder, make_private_folder, write_atomically
from launcher.inventory.hosts import Host, host_from_tree, load_inventory

_FICKLE = re.compile(rb"lookup|query|\bq\(|now\(|random|strftime|\bplugin:|\$ANSIBLE_VAULT|pipe")
_MOST = 1 << 20
"""Bytes of inventory that are read to decide whether it may be cached."""


def recall_hosts(source: Path) -> tuple[Host, ...]:
    """Return the hosts of an inventory, as `load_inventory`.

    Raises:
        ConfigError: as `load_inventory`.
    """
    path = source.absolute()
    mark = fingerprint(path)
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    kept = default_state_folder() / "inventories" / f"{name}.json"
    if mark is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            tree: dict[str, Any] = json.loads(kept.read_bytes())
            if tree["mark"] == mark:
                return tuple(host_from_tree(host) for host in tree["hosts"])
    hosts = load_inventory(source)
    if mark is not None:
        text = json.dumps({"mark": mark, "hosts": [asdict(host) for host in hosts]}, indent=1)
        with contextlib.suppress(OSError):
            make_private_folder(kept.parent)
            write_atomically(kept, text.encode(), durable=False)
    return hosts


def fingerprint(source: Path) -> str | None:
    """Return a key that changes whenever the rendering may change; None: it may change any time."""
    digest = hashlib.sha256(version("motley").encode())
    for name, value in sorted(os.environ.items()):
        if name.startswith("ANSIBLE_"):
            digest.update(f"{name}={value}\0".encode())
    size = 0
    try:
        for path in _files(source):
            about = path.stat()
            size += about.st_size
            text = path.read_bytes()
            speaks = path.suffix not in (".cfg", ".py") or path == source
            if size > _MOST or (speaks and (about.st_mode & 0o111 or _FICKLE.search(text))):
                return None
            digest.update(f"{path}\0{len(text)}\0".encode() + text)
    except OSError:
        return None
    return digest.hexdigest()


def _files(source: Path) -> Iterator[Path]:
    """Yield every file that Ansible takes variables or settings from, in a fixed order."""
    if not source.exists():
        raise FileNotFoundError(source)
    yield from _below(source)
    for place in dict.fromkeys((source if source.is_dir() else source.parent, Path.cwd())):
        for name in ("group_vars", "host_vars"):
            yield from _below(place / name)
    settings = [os.environ.get("ANSIBLE_CONFIG"), "ansible.cfg", "~/.ansible.cfg"]
    for path in (*settings, "/etc/ansible/ansible.cfg"):
        if path and (found := Path(path).expanduser().absolute()).is_file():
            yield found
    here = Path(__file__)
    yield from (here.with_name(name) for name in ("hosts.py", "variables.py", "rendering.py"))


def _below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())
