"""This machine and what is installed on it: identity, code, libraries, safeguards."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.inventory.facts.devices import Runner, main_memory, run_command, usable_cores
from launcher.inventory.facts.network import Network, read_network
from trainer.system.kernel_files import read_content

LIBRARIES = ("numpy", "safetensors", "tokenizers", "torch", "transformers", "peft")
"""Libraries whose releases should be the same on every host that trains."""

_PACKAGES = ("launcher", "trainer")
_CODE = (".py", ".yml", ".yaml", ".wgsl")
_SLEEP_TARGETS = ("sleep.target", "suspend.target", "hibernate.target")
_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"  # UEFI 2.10, 8.2: global variable

_CLOUDS = (
    ("sys_vendor", "Amazon EC2", "Amazon"),
    ("product_name", "Google Compute Engine", "Google"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "Azure"),
    ("chassis_asset_tag", "OracleCloud.com", "Oracle"),
    *(
        ("sys_vendor", name, name)
        for name in (
            *("Akamai", "Alibaba Cloud", "DigitalOcean", "Exoscale", "Hetzner", "Linode"),
            *("Scaleway", "UpCloud", "Vultr"),
        )
    ),
)
"""DMI entries of clouds' hypervisors: file, beginning, name. Bare hardware names its maker."""

SecureBoot = Literal["on", "off", "unknown"]


@dataclass(frozen=True)
class Machine:
    """One machine, as it describes itself to other hosts."""

    identity: str
    """The same for two inventory names of one machine, and for no other."""
    hostname: str
    python: str
    version: str
    """Motley's."""
    code: str
    """Digest of the installed packages' content: equal for a checkout and a wheel made of it."""
    wheel: str
    """SHA-256 of the wheel that the recipe or `launch cluster push` installed; empty else."""
    libraries: Mapping[str, str]
    cores: int
    network: Network
    memory: int | None = None
    """Bytes of main memory; None when unknown."""
    provider: str = ""
    """The cloud that the firmware names; empty for any other machine."""


def describe_machine() -> Machine:
    """Return the description of this machine."""
    return Machine(
        identity=read_machine_id(),
        hostname=platform.node(),
        python=platform.python_version(),
        version=_package_release("motley"),
        code=code_digest(Path(__file__).parents[3]),
        wheel=installed_wheel(Path(sys.prefix)),
        libraries={name: found for name in LIBRARIES if (found := _package_release(name))},
        cores=usable_cores(),
        network=read_network(),
        memory=main_memory(),
        provider=detect_provider(),
    )


def detect_provider(dmi: Path = Path("/sys/class/dmi/id")) -> str:
    """Return the cloud provider that this machine's firmware names."""
    firmware = {
        name: read_content(dmi / name)
        for name in ("sys_vendor", "product_name", "chassis_asset_tag")
    }
    for name, value, cloud in _CLOUDS:
        if firmware[name].startswith(value):
            return cloud
    return ""


def read_machine_id(proc: Path = Path("/proc"), machine_id: Path = Path("/etc/machine-id")) -> str:
    """Return an id that differs from that of every other running machine or container.

    A cloned image keeps its machine-id, and containers share a kernel: so the id also includes the
    boot and the network namespace.
    """
    parts = [
        read_content(proc / "sys/kernel/random/boot_id"),
        read_content(machine_id),
        _read_link(proc / "self/ns/net"),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def code_digest(root: Path) -> str:
    """Return the SHA-256 of the code and data files of our packages below `root`."""
    digest = hashlib.sha256()
    found = [
        path
        for package in _PACKAGES
        for path in (root / package).rglob("*")
        if path.suffix in _CODE and path.is_file()
    ]
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        # Framed by name and size, so that bytes cannot move from one file to the next.
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def secure_boot(variables: Path = Path("/sys/firmware/efi/efivars")) -> SecureBoot:
    """Return whether the firmware loads only signed kernel code; `off` without UEFI."""
    if not variables.parent.is_dir():
        return "off"
    try:
        content = (variables / _SECURE_BOOT).read_bytes()
    except FileNotFoundError:
        return "unknown" if not _has_entries(variables) else "off"
    except OSError:
        return "unknown"
    return "on" if len(content) == 5 and content[4] == 1 else "off"  # 4 bytes of attributes first


def may_sleep(run: Runner = run_command) -> bool:
    """Whether systemd allows this machine to suspend and a desktop is running that may request it.

    Not by graphical.target: Debian makes it the default without any desktop, too.
    """
    code, output = run(["systemctl", "is-enabled", *_SLEEP_TARGETS])
    if code == 127 or "masked" in output:
        return False
    code, output = run(["systemctl", "is-active", "display-manager.service"])
    return code == 0 and output.strip() == "active"


def _package_release(package: str) -> str:
    """Return a package's release without the build (`+cpu`, `+cu126`); empty when it is missing."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_wheel(prefix: Path) -> str:
    """Return the SHA-256 of the wheel that was installed there, as the trainer role noted it."""
    try:
        return str(json.loads((prefix / "motley.json").read_bytes())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _has_entries(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is not None
    except OSError:
        return False
