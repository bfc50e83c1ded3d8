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
OPTIONS = {
    "host": "ansible_host",
    "port": "ansible_port",
    "remote_user": "ansible_user",
    "private_key_file": "ansible_ssh_private_key_file",
    "ssh_args": "ansible_ssh_args",
    "ssh_common_args": "ansible_ssh_common_args",
    "ssh_extra_args": "ansible_ssh_extra_args",
}
"""Options of Ansible's ssh plugin that the launcher uses, and their names in the answer."""
REFUSED_OPTIONS = ("ssh_executable", "pkcs11_provider")
"""Options that reach a host in another way, also in `ansible.cfg` and the environment."""
_BUILT_IN = re.compile(r"^ansible\.(builtin|legacy)\.")


def render_inventory(source: str, pattern: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"hosts": [{"name", "variables", "errors", "keys"}], "groups": [...]}` in
    inventory order.

    Only the launcher's own and the connection's variables are templated: undefined
    variables of other programs do not matter. A variable that fails is under `errors`; `keys` are
    all of Ansible's own that the inventory sets. What the ssh plugin would use, by any of a
    variable's names, from ansible.cfg or the environment, is under the names of `OPTIONS`.
    """
    os.environ["ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED"] = "1"
    os.environ["ANSIBLE_NOCOLOR"] = "1"
    # Ansible's modules have no complete annotations; only this file uses them.
    from ansible import constants  # pyright: ignore
    from ansible.inventory.manager import InventoryManager  # pyright: ignore
    from ansible.parsing.dataloader import DataLoader  # pyright: ignore
    from ansible.plugins.loader import connection_loader, init_plugin_loader  # pyright: ignore
    from ansible.template import Templar  # pyright: ignore
    from ansible.vars.manager import VariableManager  # pyright: ignore

    init_plugin_loader([])
    loader: Any = DataLoader()
    config: Any = constants.config  # pyright: ignore
    file: Any = config.get_config_value("DEFAULT_VAULT_PASSWORD_FILE")
    ids: Any = config.get_config_value("DEFAULT_VAULT_IDENTITY_LIST")
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
    ours = {*manager.get_vars(include_hostvars=False), "ansible_facts"} - extra.keys()
    # Reads the definitions of the plugin's options.
    connection_loader.get("ssh", class_only=True)  # pyright: ignore
    defined: Any = config.get_configuration_definitions(plugin_type="connection", name="ssh")

    def get_option(option: str) -> Any:
        """Return an option of ansible.cfg or the environment; None for a default."""
        kind = {"plugin_type": "connection", "plugin_name": "ssh"}
        value, source = config.get_config_value_and_origin(option, variables={}, **kind)
        return None if source == "default" else value

    refused = [option for option in REFUSED_OPTIONS if get_option(option)]
    hosts: list[dict[str, Any]] = []
    for host in inventory.get_hosts(pattern, order="inventory"):
        variables: dict[str, Any] = manager.get_vars(host=host, include_hostvars=True)
        templar: Any = Templar(loader=loader, variables=variables)
        rendered: dict[str, Any] = {}
        errors: dict[str, str] = {}
        wanted = {v: v for v in variables if v.startswith(PREFIX) or v == "ansible_connection"}
        for option, name in OPTIONS.items():
            aliases = [entry["name"] for entry in defined[option]["vars"]]
            given = [
                alias for alias in aliases if alias in variables and alias != "inventory_hostname"
            ]
            if given:
                wanted[name] = given[-1]  # the last of its names counts, as for the plugin
            elif (value := get_option(option)) is not None:
                rendered[name] = value
        for name, variable in wanted.items():
            try:
                rendered[name] = json.loads(json.dumps(templar.template(variables[variable])))
            except Exception as error:  # whatever Jinja or a vault raises, one line follows
                errors[variable] = " ".join(str(error).split())
        if "ansible_connection" not in errors:
            named = str(rendered.get("ansible_connection") or constants.DEFAULT_TRANSPORT)  # pyright: ignore
            rendered["ansible_connection"] = _BUILT_IN.sub("", named)
        keys = [key for key in variables if key.startswith("ansible_") and key not in ours]
        hosts.append(
            {
                "name": str(host.name),
                "variables": rendered,
                "errors": errors,
                "keys": [*keys, *refused],
            }
        )
    return {"hosts": hosts, "groups": sorted(str(name) for name in inventory.groups)}


def find_origin(error: BaseException | None) -> str:
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
        answer = render_inventory(request["source"], request["pattern"], request["extra"])
    except ImportError as error:
        answer = {"missing": str(error)}
    except Exception as error:  # Ansible's parsers raise many kinds; the launcher prints one line
        answer = {"error": " ".join(str(error).split()), "origin": find_origin(error)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
