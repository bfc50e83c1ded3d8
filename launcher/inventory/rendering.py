"""Ansible's own view of an inventory, as JSON: `python -P -m launcher.inventory.rendering`.

A child process of the launcher: Ansible reads the environment and ansible.cfg when it is imported,
prints to stdout and exits on a wrong locale. With `-P`, as every Python that Motley starts: modules
in the current folder are not imported. The request comes on stdin; the answer goes to stdout,
Ansible's warnings to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

PREFIX = "motley_"
CONNECTION_VARIABLES = (
    "ansible_connection",
    "ansible_host",
    "ansible_port",
    "ansible_user",
    "ansible_private_key_file",
    "ansible_ssh_common_args",
    "ansible_ssh_extra_args",
    "ansible_ssh_private_key_file",
)


def render(source: str, pattern: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"hosts": [{"name", "variables", "errors"}], "groups": [...]}` in inventory order.

    Only the launcher's own and the connection's variables are templated: undefined
    variables of other programs do not matter. A variable that fails is under `errors`.
    """
    os.environ["ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED"] = "1"
    os.environ["ANSIBLE_NOCOLOR"] = "1"
    # Ansible's modules have no complete annotations; only this file uses them.
    from ansible import constants  # pyright: ignore
    from ansible.inventory.manager import InventoryManager  # pyright: ignore
    from ansible.parsing.dataloader import DataLoader  # pyright: ignore
    from ansible.plugins.loader import init_plugin_loader  # pyright: ignore
    from ansible.template import Templar  # pyright: ignore
    from ansible.vars.manager import VariableManager  # pyright: ignore

    init_plugin_loader([])
    loader: Any = DataLoader()
    file: Any = constants.config.get_config_value("DEFAULT_VAULT_PASSWORD_FILE")  # pyright: ignore
    ids: Any = constants.config.get_config_value("DEFAULT_VAULT_IDENTITY_LIST")  # pyright: ignore
    if file or ids:
        from ansible.cli import CLI  # pyright: ignore  # a tenth of Ansible's start

        secrets: Any = CLI.setup_vault_secrets(  # pyright: ignore
            loader,
            vault_ids=ids,
            vault_password_files=[file] if file else [],
            ask_vault_pass=False,
            auto_prompt=False,
        )
        loader.set_vault_secrets(secrets)
    inventory: Any = InventoryManager(loader=loader, sources=[source])
    manager: Any = VariableManager(loader=loader, inventory=inventory)
    manager._extra_vars = dict(extra)  # the manager's own entry point is the ansible command line
    hosts: list[dict[str, Any]] = []
    for host in inventory.get_hosts(pattern, order="inventory"):
        variables: dict[str, Any] = manager.get_vars(host=host, include_hostvars=True)
        templar: Any = Templar(loader=loader, variables=variables)
        rendered: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for name, value in variables.items():
            if name.startswith(PREFIX) or name in CONNECTION_VARIABLES:
                try:
                    rendered[name] = json.loads(json.dumps(templar.template(value)))
                except Exception as error:  # whatever Jinja or a vault raises, one line follows
                    errors[name] = " ".join(str(error).split())
        hosts.append({"name": str(host.name), "variables": rendered, "errors": errors})
    return {"hosts": hosts, "groups": sorted(str(name) for name in inventory.groups)}


def origin(error: BaseException | None) -> str:
    """Return `path:line:column` of Ansible's error; empty if it has none."""
    while error is not None:
        context = str(getattr(error, "_formatted_source_context", None) or "")
        if found := re.search(r"^Origin: (/\S+:\d+(?::\d+)?)", context, re.MULTILINE):
            return found.group(1)
        error = error.__cause__ or error.__context__
    return ""


def main() -> int:
    """Answer the request on stdin; a failure is `{"error": ...}`, with exit code 0 as well."""
    gc.disable()  # a tenth of Ansible's start, for a process that ends with its answer
    request = json.loads(sys.stdin.read())
    answer: dict[str, Any]
    try:
        answer = render(request["source"], request["pattern"], request["extra"])
    except ImportError as error:
        answer = {"missing": str(error)}
    except Exception as error:  # Ansible's parsers raise many kinds; the launcher prints one line
        answer = {"error": " ".join(str(error).split()), "origin": origin(error)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
