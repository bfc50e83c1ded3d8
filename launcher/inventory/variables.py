"""The variables of a host that the launcher reads, and their types."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import shlex
from dataclasses import replace
from typing import Any, NoReturn, cast

from launcher.errors import ConfigError
from launcher.inventory.facts.devices import Device
from trainer.config.budget import CURRENCY
from trainer.config.parallel import GROUP_STRATEGIES
from trainer.system.backends import BACKENDS, TORCH_BACKENDS
from trainer.system.key_table import KeyTable

VARIABLES: dict[str, str] = {
    "motley_coordinator": "true or false",
    "motley_bind_address": "one IP address",
    "motley_connect_address": "an IP address or a host name",
    "motley_port": "a number from 1 to 65535",
    "motley_devices": "`auto` or a list of {backend: cuda|wgpu|cpu, id: ..., threads: ...} and "
    "{backend: cuda|cpu, ids: [...], strategy: ...}",
    "motley_fill_with_cpu": "true or false",
    "motley_teacher": "true or false",
    "motley_student": "true or false",
    "motley_evaluator": "true or false",
    "motley_trainer_command": "a list of strings",
    "motley_state_folder": "an absolute path",
    "motley_share_folder": "an absolute path",
    "motley_link_rates": "a mapping of hosts to Mbit/s above 0",
    "motley_price_hour": "a number, 0 or more: the rent of an hour",
    "motley_watts": "a number above 0: its power under load",
    "motley_price_kwh": "a number, 0 or more",
    "motley_currency": "a code of ISO 4217, such as EUR",
    "motley_rented": "true or false",
}
"""Every variable the launcher reads, with what is allowed. inventory/local.yml documents them."""

_WITH_A_KEY = "is not used: log in with a key (ssh-copy-id), and remove it"
_KEY = "is not used: write the key to a file and name it in ansible_ssh_private_key_file"
_PROGRAM = "is not used: Motley logs in with the OpenSSH of PATH; remove it"
_IN_SSH_CONFIG = "is not used: name the provider in ssh_config (PKCS11Provider), and remove it"
INVENTORY_KEYS = KeyTable(
    "the inventory",
    used=frozenset(
        (
            *VARIABLES,
            *("ansible_connection", "ansible_host", "ansible_ssh_host"),
            *("ansible_port", "ansible_ssh_port", "ansible_user", "ansible_ssh_user"),
            *("ansible_private_key_file", "ansible_ssh_private_key_file", "ansible_ssh_args"),
            *("ansible_ssh_common_args", "ansible_ssh_extra_args"),
        )
    ),
    harmless=frozenset(
        (
            # Of Ansible's own work on the host.
            *("ansible_become", "ansible_become_exe", "ansible_become_flags"),
            *("ansible_become_method", "ansible_become_pass", "ansible_become_password"),
            *("ansible_become_user", "ansible_python_interpreter", "ansible_async_dir"),
            *("ansible_remote_tmp", "ansible_shell_allow_world_readable_temp"),
            *("ansible_shell_executable", "ansible_shell_type", "ansible_sudo_pass"),
            *("ansible_pipelining", "ansible_ssh_pipelining", "ansible_ssh_transfer_method"),
            *("ansible_scp_executable", "ansible_scp_extra_args", "ansible_sftp_batch_mode"),
            *("ansible_sftp_executable", "ansible_sftp_extra_args", "ansible_ssh_use_tty"),
            # Motley has its own: keys are always verified, connections are not shared.
            *("ansible_host_key_checking", "ansible_ssh_host_key_checking"),
            *("ansible_control_path", "ansible_control_path_dir", "ansible_ssh_retries"),
            *("ansible_ssh_timeout", "ansible_timeout", "ansible_ssh_verbosity"),
        )
    ),
    refused={
        **dict.fromkeys(
            (
                *("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
                *("ansible_sshpass_prompt", "ansible_ssh_password_mechanism"),
                *("ansible_private_key_passphrase", "ansible_ssh_private_key_passphrase"),
            ),
            _WITH_A_KEY,
        ),
        **dict.fromkeys(("ansible_private_key", "ansible_ssh_private_key"), _KEY),
        **dict.fromkeys(("ansible_ssh_executable", "ssh_executable"), _PROGRAM),
        **dict.fromkeys(("ansible_ssh_pkcs11_provider", "pkcs11_provider"), _IN_SSH_CONFIG),
    },
)
"""Variables of the launcher and of Ansible, and options of ansible.cfg under their own names."""

_BACKENDS = tuple(BACKENDS)


class VariableReader:
    """One host's variables with their types checked: every wrong one raises ConfigError."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self._where = where
        self._values = values

    def refuse(self, variable: str, message: str) -> NoReturn:
        """Raise the ConfigError of a variable."""
        raise ConfigError(
            f"{self._where}: {variable}: {message}, got {self._values.get(variable)!r}"
        )

    def get_text(self, variable: str) -> str | None:
        """Return a text that is not blank, None for a missing variable."""
        value = self._values.get(variable)
        if value is not None and not (isinstance(value, str) and value.strip()):
            self.refuse(variable, f"must be {VARIABLES.get(variable, 'a text')}")
        return value

    def read_flag(self, variable: str) -> bool:
        """Return whether a variable is set and true."""
        value = self._values.get(variable, False)
        if isinstance(value, str):  # Jinja returns strings
            value = {"true": True, "false": False, "yes": True, "no": False}.get(value.lower())
        if not isinstance(value, bool):
            self.refuse(variable, "must be true or false")
        return bool(value)

    def read_port(self, variable: str) -> int | None:
        """Return a port number."""
        value = self._values.get(variable)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
            self.refuse(variable, "must be a number from 1 to 65535")
        return value

    def bind_address(self) -> str | None:
        """Return the address of one network interface, as it is written usually."""
        value = self.get_text("motley_bind_address")
        if value is None:
            return None
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            self.refuse("motley_bind_address", "must be one IP address")
        if address.is_unspecified or address.is_multicast:
            self.refuse("motley_bind_address", "must be the address of one network interface")
        return str(address)

    def read_devices(self) -> tuple[Device, ...] | None:
        """Return the listed devices; None if they are to be detected."""
        value = self._values.get("motley_devices", "auto")
        if value == "auto":
            return None
        if not isinstance(value, list):
            self.refuse("motley_devices", f"must be {VARIABLES['motley_devices']}")
        devices = tuple(
            device
            for number, entry in enumerate(cast("list[Any]", value))
            for device in self._read_entry(entry, number)
        )
        ids = [device.id for device in devices if device.is_gpu]
        for double in {identity for identity in ids if ids.count(identity) > 1}:
            self.refuse("motley_devices", f"names {double} twice")
        return devices

    def _read_entry(self, entry: object, number: int) -> tuple[Device, ...]:
        """Return the devices of one worker: one, or those of a replica group."""
        if not isinstance(entry, dict):
            self.refuse("motley_devices", "must contain mappings such as {backend: cpu}")
        fields = dict(cast("dict[str, Any]", entry))
        if fields.keys().isdisjoint({"ids", "strategy"}):
            return (self._read_device(fields),)
        ids, strategy = fields.pop("ids", None), fields.pop("strategy", None)
        if strategy not in GROUP_STRATEGIES:
            self.refuse("motley_devices", f"strategy must be one of {', '.join(GROUP_STRATEGIES)}")
        if fields.get("backend") not in TORCH_BACKENDS:
            able = " or ".join(TORCH_BACKENDS)
            self.refuse("motley_devices", f"a replica group's backend must be {able}")
        if "id" in fields or not isinstance(ids, list) or len(cast("list[Any]", ids)) < 2:
            self.refuse("motley_devices", "a replica group needs `ids`: two or more devices")
        devices = [
            self._read_device({**fields, "id": identity}) for identity in cast("list[Any]", ids)
        ]
        return tuple(replace(device, group=number, strategy=strategy) for device in devices)

    def _read_device(self, fields: dict[str, Any]) -> Device:
        backend = fields.get("backend")
        if backend not in _BACKENDS:
            self.refuse("motley_devices", f"backend must be one of {', '.join(_BACKENDS)}")
        for unknown in fields.keys() - {"backend", "id", "threads"}:
            known = "backend, id, threads; ids and strategy of a group"
            self.refuse("motley_devices", f"unknown key {unknown} (known: {known})")
        identity = fields.get("id", "cpu" if backend == "cpu" else None)
        if not isinstance(identity, str) or identity.isdigit():
            self.refuse("motley_devices", "a GPU needs `id`: its UUID or PCI address, no index")
        threads = fields.get("threads")
        if threads is not None and (
            not isinstance(threads, int) or isinstance(threads, bool) or threads < 1
        ):
            self.refuse("motley_devices", "threads must be a number above 0")
        return Device(backend, str(identity), threads=threads)

    def read_command(self) -> tuple[str, ...] | None:
        """Return the trainer's command."""
        value = self._values.get("motley_trainer_command")
        if value is None:
            return None
        parts = cast("list[Any]", value) if isinstance(value, list) else []
        if not parts or not all(isinstance(part, str) and part for part in parts):
            self.refuse("motley_trainer_command", "must be a list of strings")
        return tuple(cast("list[str]", parts))

    def read_folder(self, variable: str) -> str | None:
        """Return an absolute path."""
        value = self.get_text(variable)
        if value is not None and not value.startswith("/"):
            self.refuse(variable, "must be an absolute path")
        return value

    def link_rates(self) -> tuple[tuple[str, float], ...]:
        """Return the rates to other hosts by their names, in bit/s."""
        value = self._values.get("motley_link_rates", {})
        if not isinstance(value, dict):
            self.refuse("motley_link_rates", f"must be {VARIABLES['motley_link_rates']}")
        rates = cast("dict[Any, Any]", value)
        for rate in rates.values():
            if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < 1e9:
                self.refuse("motley_link_rates", f"must be {VARIABLES['motley_link_rates']}")
        return tuple((str(name), 1e6 * float(rate)) for name, rate in rates.items())

    def read_prices(self) -> dict[str, Any]:
        """Return the prices of the host, by the names of `Host`."""
        hour = self._read_amount("motley_price_hour")
        kwh = self._read_amount("motley_price_kwh")
        currency = self.get_text("motley_currency")
        if currency is not None and not re.fullmatch(CURRENCY, currency):
            self.refuse("motley_currency", f"must be {VARIABLES['motley_currency']}")
        if currency is None and (hour is not None or kwh is not None):
            self.refuse("motley_currency", "a price needs its currency, such as EUR")
        rented = "motley_rented" in self._values
        return {
            "price_hour": hour,
            "watts": self._read_amount("motley_watts", above=True),
            "price_kwh": kwh,
            "currency": currency,
            "rented": self.read_flag("motley_rented") if rented else None,
        }

    def _read_amount(self, variable: str, *, above: bool = False) -> float | None:
        value = self._values.get(variable)
        if value is None:
            return None
        with contextlib.suppress(ValueError):
            value = float(value) if isinstance(value, str) else value  # Jinja returns strings
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf or (above and not value):
            self.refuse(variable, f"must be {VARIABLES[variable]}")
        return float(value)

    def read_arguments(self, variable: str) -> tuple[str, ...]:
        """Read a line of arguments for ssh; an empty one switches Ansible's default off."""
        value = self._values.get(variable)
        if value is None:
            return ()
        if not isinstance(value, str):
            self.refuse(variable, "must be a string")
        try:
            return tuple(shlex.split(value))
        except ValueError:
            self.refuse(variable, "has an unclosed quotation mark")
