"""Filters that choose a driver's packages: pure functions over what apt, dpkg and the kernel say.

Nothing is installed by a name that `apt-cache policy` on that very host does not know.
"""

from __future__ import annotations

import base64
import re
from typing import Any

GENERAL_KERNELS = {"22.04": "5.15.", "24.04": "6.8."}
"""The kernel an Ubuntu release was made with; a newer one is its hardware enablement kernel."""


def apt_candidates(policy: str) -> dict[str, str]:
    """`apt-cache policy NAMES` -> version by name of those that can be installed."""
    found: dict[str, str] = {}
    name = ""
    for line in policy.splitlines():
        if line and not line[0].isspace() and line.endswith(":"):
            name = line[:-1]
        elif (match := re.match(r"^  Candidate: (\S+)$", line)) and match[1] != "(none)":
            found[name] = match[1]
    return found


def upstream(version: str) -> str:
    """`535.309.01-0+deb12u1` -> `535.309.01`: what module and library must agree on."""
    return re.split(r"[-+~]", version.rpartition(":")[2])[0]


def nvidia_names(
    kernel: str, release: str, branch: str = "580", source: str = "distribution"
) -> list[str]:
    """Return every package name that the choice below may fall on, to ask apt about."""
    if source == "nvidia":
        return [
            f"nvidia-driver-pinning-{branch}",
            "nvidia-kernel-open-dkms",
            "nvidia-kernel-dkms",
            "nvidia-driver-cuda",
            *("libnvidia-gl", "nvidia-vulkan-icd", "nvidia-driver-libs"),
            "nvidia-persistenced",
            *_headers(kernel, release),
        ]
    if release.startswith("Ubuntu"):
        flavour, meta = _flavour(kernel, release)
        return [
            f"linux-modules-nvidia-{branch}-server-open-{kernel}",
            f"linux-modules-nvidia-{branch}-server-open-{meta or flavour}",
            f"nvidia-dkms-{branch}-server-open",
            f"nvidia-headless-no-dkms-{branch}-server-open",
            f"nvidia-utils-{branch}-server",
            f"libnvidia-gl-{branch}-server",
            *_headers(kernel, release),
        ]
    return [
        "nvidia-kernel-dkms",
        "nvidia-open-kernel-dkms",
        "nvidia-smi",
        "libcuda1",
        "nvidia-vulkan-icd",
        "nvidia-persistenced",
        *_headers(kernel, release),
    ]


def nvidia_choice(
    policy: str,
    *,
    kernel: str,
    release: str,
    branch: str = "580",
    open_modules: bool = True,
    source: str = "distribution",
) -> dict[str, Any]:
    """Choose the packages for a host from its `apt-cache policy` of `nvidia_names`.

    Returns `packages`, `version` (upstream), `dkms` (built here, so Secure Boot needs a key),
    `notes` and `problems`; with problems nothing may be installed.
    """
    known = apt_candidates(policy)
    if source == "nvidia":
        choice = _from_nvidia(known, branch, open_modules)
    elif release.startswith("Ubuntu"):
        choice = _from_ubuntu(known, kernel, release, branch)
    else:
        choice = _from_debian(known, open_modules)
    if choice["dkms"]:
        running, rolling = _headers(kernel, release)
        choice["packages"] += [name for name in (running, rolling) if name in known]
        if running not in known:
            choice["problems"].append(
                f"apt has no {running}, and the driver is built for the running "
                "kernel: apt full-upgrade, reboot into the new kernel, run this again"
            )
    return choice


def secure_boot(content: str) -> bool:
    """The SecureBoot EFI variable in base64 -> whether it is on; its last byte says so."""
    data = base64.b64decode(content or "")
    return len(data) == 5 and data[4] == 1


def driver_state(loaded: str, on_disk: str, library: str, nouveau: bool) -> dict[str, Any]:
    """Compare the loaded module, the one on disk and the library: `load`, `reboot` or neither.

    A loaded module keeps its version until it is unloaded; nvidia-smi then fails with
    "Driver/library version mismatch".
    """
    state = {"action": "none", "reason": f"driver {loaded} is loaded and matches its library"}
    if nouveau and not loaded:
        state = {"action": "reboot", "reason": "nouveau holds the card until the next boot"}
    elif not loaded and on_disk:
        state = {"action": "load", "reason": f"driver {on_disk} is installed and not loaded"}
    elif not loaded:
        state = {"action": "fail", "reason": "no nvidia module for the running kernel was built"}
    elif library and loaded != library:
        state = {
            "action": "reboot",
            "reason": f"module {loaded} is loaded, the library is {library}",
        }
    return state


def library_version(paths: list[str], loaded: str = "") -> str:
    """`libnvidia-ml.so.580.95.05` among paths -> `580.95.05`; empty when there is none.

    Of several, left by other installers, the one that fits the loaded module counts.
    """
    versions = [m[1] for p in paths if (m := re.search(r"libnvidia-ml\.so\.(\d+\.[\d.]+)$", p))]
    return loaded if loaded in versions else next(iter(versions), "")


def apt_missing(targets: str, wanted: list[str], own: str) -> list[dict[str, Any]]:
    """`apt-get indextargets` -> the entries that bring components the archive has and apt lacks.

    `targets` holds lines `uri|suite|component|keyring|origin|file:line`; `own` is our file, which
    does not count. An entry repeats the keyring of its archive, or apt refuses both.
    """
    archives: dict[str, dict[str, Any]] = {}
    for line in targets.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 6 or fields[4] != "Debian" or fields[5].startswith(own):
            continue
        uri, suite, component, keyring, _, _ = fields
        archive = archives.setdefault(uri, {"suites": set(), "have": set(), "keyring": keyring})
        archive["suites"].add(suite)
        archive["have"].add(component)
    missing = [
        {
            "name": f"motley-{own.rpartition('motley-')[2]}-{number}",
            "uri": uri,
            "suites": sorted(archive["suites"]),
            "components": [one for one in wanted if one not in archive["have"]],
            "keyring": "" if "$(" in archive["keyring"] else archive["keyring"],
        }
        for number, (uri, archive) in enumerate(sorted(archives.items()))
        if "main" in archive["have"]
    ]
    return [entry for entry in missing if entry["components"]]


def apt_unread(targets: str, entries: list[dict[str, Any]]) -> bool:
    """Whether apt has not read its lists since entries of `apt_missing` were written.

    `targets` are as above. They name only lists that were fetched, so they may be from before the
    entries were written. One archive's list of a component is enough: another's may be empty, and
    apt keeps no empty list. An entry without components is a repository of its own.
    """
    there: set[tuple[str, str]] = set()
    for line in targets.splitlines():
        fields = [field.strip() for field in line.split("|")]
        file, ours, _ = fields[-1].rpartition("/")[2].partition(".sources:")
        if len(fields) == 6 and ours:
            there |= {(file, fields[2]), (file, "")}
    names = [entry["name"] for entry in entries if entry["components"]]
    wanted = {component for entry in entries for component in entry["components"]}
    return not (
        all(any((name, one) in there for name in names) for one in wanted)
        and all((entry["name"], "") in there for entry in entries if not entry["components"])
    )


def _from_ubuntu(known: dict[str, str], kernel: str, release: str, branch: str) -> dict[str, Any]:
    flavour, meta = _flavour(kernel, release)
    exact = f"linux-modules-nvidia-{branch}-server-open-{kernel}"
    rolling = f"linux-modules-nvidia-{branch}-server-open-{meta or flavour}"
    userland = [f"nvidia-utils-{branch}-server", f"libnvidia-gl-{branch}-server"]
    headless = f"nvidia-headless-no-dkms-{branch}-server-open"
    choice = _choice(known, [headless, *userland], "restricted")
    if exact in known:
        choice["packages"] += [name for name in (exact, rolling) if name in known]
        return choice
    choice["notes"].append(f"Canonical has no signed module {exact}: it is built here with DKMS")
    choice["packages"].append(f"nvidia-dkms-{branch}-server-open")
    choice["dkms"] = True
    _require(choice, known, choice["packages"], "restricted")
    return choice


def _from_debian(known: dict[str, str], open_modules: bool) -> dict[str, Any]:
    names = ["nvidia-smi", "libcuda1", "nvidia-vulkan-icd", "nvidia-persistenced"]
    choice = _choice(known, names, "non-free")
    choice["dkms"] = True
    module = "nvidia-kernel-dkms"
    candidate = upstream(known.get("nvidia-open-kernel-dkms", ""))
    if open_modules and candidate and candidate == choice["version"]:
        module = "nvidia-open-kernel-dkms"
    elif open_modules and candidate:
        choice["notes"].append(
            f"the open module is {candidate} and the library {choice['version']}, which would not "
            "work together: the other module is taken"
        )
    choice["packages"].insert(0, module)
    _require(choice, known, [module], "non-free")
    if known.get(module) and upstream(known[module]) != choice["version"]:
        choice["problems"].append(
            f"{module} is {upstream(known[module])} and libcuda1 {choice['version']}: "
            "a mirror is being updated, run this again later"
        )
    return choice


def _from_nvidia(known: dict[str, str], branch: str, open_modules: bool) -> dict[str, Any]:
    module = "nvidia-kernel-open-dkms" if open_modules else "nvidia-kernel-dkms"
    names = [f"nvidia-driver-pinning-{branch}", module, "nvidia-driver-cuda", "nvidia-persistenced"]
    choice = _choice(known, names, "NVIDIA's repository")
    choice["dkms"] = True
    vulkan = [n for n in ("libnvidia-gl", "nvidia-vulkan-icd", "nvidia-driver-libs") if n in known]
    choice["packages"] += vulkan[:1]
    if not vulkan:
        choice["notes"].append("no package with NVIDIA's Vulkan driver was found: CUDA only")
    return choice


def _choice(known: dict[str, str], packages: list[str], where: str) -> dict[str, Any]:
    versioned = [known[name] for name in packages if name in known and "persistenced" not in name]
    choice: dict[str, Any] = {
        "packages": list(packages),
        "version": upstream(versioned[-1]) if versioned else "",
        "dkms": False,
        "notes": [],
        "problems": [],
    }
    _require(choice, known, packages, where)
    return choice


def _require(
    choice: dict[str, Any], known: dict[str, str], packages: list[str], where: str
) -> None:
    for name in packages:
        line = f"apt knows no package {name} here: is {where} among the host's sources?"
        if name not in known and line not in choice["problems"]:
            choice["problems"].append(line)


def _headers(kernel: str, release: str) -> tuple[str, str]:
    """Return the headers of the running kernel, and the package that follows its updates."""
    flavour, meta = _flavour(kernel, release)
    return f"linux-headers-{kernel}", f"linux-headers-{meta or flavour}"


def _flavour(kernel: str, release: str) -> tuple[str, str]:
    """Return a kernel's flavour, and that of the hardware enablement kernels where it is one."""
    flavour = kernel.rpartition("-")[2]
    number = release.rpartition(" ")[2]
    general = GENERAL_KERNELS.get(number, "")
    newer = bool(general) and flavour == "generic" and not kernel.startswith(general)
    return flavour, f"{flavour}-hwe-{number}" if newer else ""


class FilterModule:
    """What Ansible asks a filter plugin for."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by the names that tasks use."""
        return {
            "motley_apt_missing": apt_missing,
            "motley_apt_unread": apt_unread,
            "motley_nvidia_names": lambda kernel, **rest: nvidia_names(kernel, **rest),
            "motley_nvidia_choice": nvidia_choice,
            "motley_secure_boot": secure_boot,
            "motley_driver_state": lambda loaded, **rest: driver_state(loaded, **rest),
            "motley_library_version": library_version,
        }
