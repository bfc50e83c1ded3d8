"""Which packages a host gets, from what its apt said: never a name that apt does not know."""

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.plugins import load

RECORDED = Path(__file__).parent / "recorded"
driver = load("filter_plugins/motley_driver.py")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def choose(name: str, kernel: str, release: str, **options: Any) -> dict[str, Any]:
    return driver.nvidia_choice(recorded(name), kernel=kernel, release=release, **options)


def test_debian_12_gets_a_module_of_the_librarys_version() -> None:
    """The open module of Debian 12 lags behind its security updates: it would not fit."""
    choice = choose("apt-policy-debian12.txt", "6.1.0-56-amd64", "Debian 12")
    assert choice["packages"] == [
        "nvidia-kernel-dkms",
        "nvidia-smi",
        "libcuda1",
        "nvidia-vulkan-icd",
        "nvidia-persistenced",
        "linux-headers-6.1.0-56-amd64",
        "linux-headers-amd64",
    ]
    assert choice["version"] == "535.309.01"
    assert choice["dkms"]
    assert choice["problems"] == []
    assert "535.261.03" in choice["notes"][0]


def test_debian_13_gets_the_open_module() -> None:
    kernel = "6.12.117+deb13-amd64"
    choice = choose("apt-policy-debian13.txt", kernel, "Debian 13")
    assert choice["packages"][0] == "nvidia-open-kernel-dkms"
    assert f"linux-headers-{kernel}" in choice["packages"]
    assert (choice["version"], choice["problems"], choice["notes"]) == ("550.163.01", [], [])
    older = choose("apt-policy-debian13.txt", kernel, "Debian 13", open_modules=False)
    assert older["packages"][0] == "nvidia-kernel-dkms"


@pytest.mark.parametrize(
    ("name", "kernel", "release", "meta"),
    [
        ("ubuntu2204", "5.15.0-204-generic", "Ubuntu 22.04", "generic"),
        ("ubuntu2204-hwe", "6.8.0-149-generic", "Ubuntu 22.04", "generic-hwe-22.04"),
        ("ubuntu2404", "6.8.0-151-generic", "Ubuntu 24.04", "generic"),
    ],
)
def test_ubuntu_gets_canonicals_signed_module_and_vulkan(
    name: str, kernel: str, release: str, meta: str
) -> None:
    choice = choose(f"apt-policy-{name}.txt", kernel, release)
    assert choice["packages"] == [
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-utils-580-server",
        "libnvidia-gl-580-server",
        f"linux-modules-nvidia-580-server-open-{kernel}",
        f"linux-modules-nvidia-580-server-open-{meta}",
    ]
    assert not choice["dkms"]
    assert choice["problems"] == []
    assert choice["version"].startswith("580.")


def test_a_kernel_without_a_signed_module_builds_one() -> None:
    choice = choose("apt-policy-ubuntu2404-old-kernel.txt", "6.8.0-31-generic", "Ubuntu 24.04")
    assert choice["dkms"]
    assert choice["packages"][-3:] == [
        "nvidia-dkms-580-server-open",
        "linux-headers-6.8.0-31-generic",
        "linux-headers-generic",
    ]
    assert "DKMS" in choice["notes"][0]


def test_missing_components_are_named_and_nothing_is_guessed() -> None:
    choice = choose("apt-policy-debian13-main-only.txt", "6.12.117+deb13-amd64", "Debian 13")
    assert any("nvidia-smi" in p and "non-free" in p for p in choice["problems"])


def test_a_kernel_whose_headers_are_gone_is_a_problem_with_a_remedy() -> None:
    choice = choose("apt-policy-debian13.txt", "6.12.1-amd64", "Debian 13")
    (problem,) = choice["problems"]
    assert "linux-headers-6.12.1-amd64" in problem
    assert "reboot" in problem
    assert "linux-headers-6.12.1-amd64" not in choice["packages"]


def test_nvidias_repository_pins_the_branch_and_takes_the_vulkan_it_has() -> None:
    policy = "".join(
        f"{name}:\n  Installed: (none)\n  Candidate: {version}\n  Version table:\n"
        for name, version in {
            "nvidia-driver-pinning-580": "580-1",
            "nvidia-kernel-open-dkms": "580.178.04-1",
            "nvidia-driver-cuda": "580.178.04-1",
            "libnvidia-gl": "(none)",
            "nvidia-vulkan-icd": "580.178.04-1",
            "nvidia-persistenced": "580.178.04-1",
            "linux-headers-6.12.1-amd64": "6.12.1-1",
        }.items()
    )
    options = {"kernel": "6.12.1-amd64", "release": "Debian 13", "source": "nvidia"}
    choice = driver.nvidia_choice(policy, **options)
    assert choice["packages"] == [
        "nvidia-driver-pinning-580",
        "nvidia-kernel-open-dkms",
        "nvidia-driver-cuda",
        "nvidia-persistenced",
        "nvidia-vulkan-icd",
        "linux-headers-6.12.1-amd64",
    ]
    assert choice["problems"] == []
    assert set(choice["packages"]) <= set(
        driver.nvidia_names("6.12.1-amd64", "Debian 13", source="nvidia")
    )


def test_a_mirror_in_the_middle_of_an_update_is_waited_for() -> None:
    module, rest = recorded("apt-policy-debian12.txt").split("nvidia-open-kernel-dkms:")
    policy = f"{module.replace('535.309.01', '535.310.02')}nvidia-open-kernel-dkms:{rest}"
    options = {"kernel": "6.1.0-56-amd64", "release": "Debian 12"}
    assert any("again later" in p for p in driver.nvidia_choice(policy, **options)["problems"])


def test_every_chosen_name_was_asked_about() -> None:
    for name, kernel, release in (
        ("debian12", "6.1.0-56-amd64", "Debian 12"),
        ("ubuntu2204-hwe", "6.8.0-149-generic", "Ubuntu 22.04"),
        ("ubuntu2404-old-kernel", "6.8.0-31-generic", "Ubuntu 24.04"),
    ):
        names = driver.nvidia_names(kernel, release)
        assert set(choose(f"apt-policy-{name}.txt", kernel, release)["packages"]) <= set(names)


def test_missing_components_are_added_for_each_archive_with_its_keyring() -> None:
    targets = recorded("apt-targets-debian13-main-only.txt")
    own = "/etc/apt/sources.list.d/motley-nvidia"
    wanted = ["contrib", "non-free", "non-free-firmware"]
    archive, security = driver.apt_missing(targets, wanted, own)[::-1]
    assert (archive["uri"], archive["suites"], archive["components"], archive["keyring"]) == (
        "http://deb.debian.org/debian/",
        ["trixie", "trixie-updates"],
        wanted,
        "",
    )
    assert security["suites"] == ["trixie-security"]
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    signed = targets.replace("$(SIGNED_BY)", key)
    assert {entry["keyring"] for entry in driver.apt_missing(signed, wanted, own)} == {key}

    # Ours does not count, or it would vanish from the list that wrote it; somebody else's does.
    line = "http://deb.debian.org/debian/|trixie|{}|$(SIGNED_BY)|Debian|{}:1\n"
    ours = "".join(line.format(one, f"{own}-1.sources") for one in wanted)
    theirs = "".join(line.format(one, "/etc/apt/sources.list") for one in wanted)
    assert len(driver.apt_missing(targets + ours, wanted, own)) == 2
    assert [e["uri"] for e in driver.apt_missing(targets + theirs, wanted, own)] == [
        security["uri"]
    ]
    foreign = "https://example.org/apt/|trixie|main|$(SIGNED_BY)|Example|/etc/apt/x.list:1\n"
    assert driver.apt_missing(foreign, wanted, own) == []


def test_a_component_is_read_when_apt_has_its_list() -> None:
    """Whether a play added the source now, or one that died an hour ago, is the same."""
    own = "/etc/apt/sources.list.d/motley-vulkan"
    before = recorded("apt-targets-debian13-main-only.txt")
    entry, security = driver.apt_missing(before, ["non-free-firmware"], own)[::-1]
    line = (
        f"{entry['uri']}|trixie|{{}}|$(SIGNED_BY)|Debian|/etc/apt/sources.list.d/{{}}.sources:1\n"
    )
    fetched = line.format("non-free-firmware", entry["name"])
    assert driver.apt_unread(before, [entry])
    assert not driver.apt_unread(before + fetched, [entry])
    assert driver.apt_unread(before + line.format("contrib", entry["name"]), [entry])
    assert driver.apt_unread(before + line.format("non-free-firmware", "another"), [entry])
    assert not driver.apt_unread(before + fetched, [security, entry]), "its list may be empty"
    assert not driver.apt_unread(before, [])
    flat = {"name": "motley-nvidia-cuda", "uri": "https://example.org/cuda", "components": []}
    there = "https://example.org/cuda/|$(CODENAME)|$(COMPONENT)|k|NVIDIA|/x/motley-nvidia-cuda.sources:1"
    assert driver.apt_unread(before, [flat])
    assert not driver.apt_unread(there, [flat])


@pytest.mark.parametrize(("content", "on"), [(b"\x06\0\0\0\1", True), (b"\x06\0\0\0\0", False)])
def test_secure_boot_is_the_last_byte_of_its_variable(content: bytes, on: bool) -> None:
    assert driver.secure_boot(base64.b64encode(content).decode()) is on
    assert driver.secure_boot("") is False  # no EFI


@pytest.mark.parametrize(
    ("loaded", "on_disk", "library", "nouveau", "action"),
    [
        ("580.178.04", "580.178.04", "580.178.04", False, "none"),
        ("580.105.08", "580.178.04", "580.178.04", False, "reboot"),
        ("", "580.178.04", "580.178.04", False, "load"),
        ("", "580.178.04", "580.178.04", True, "reboot"),
        ("", "", "580.178.04", False, "fail"),
    ],
)
def test_a_reboot_is_asked_for_only_where_loading_cannot_help(
    loaded: str, on_disk: str, library: str, nouveau: bool, action: str
) -> None:
    state = driver.driver_state(loaded, on_disk=on_disk, library=library, nouveau=nouveau)
    assert state["action"] == action


def test_the_librarys_version_is_in_its_name() -> None:
    folder = "/usr/lib/x86_64-linux-gnu/nvidia/current"
    assert driver.library_version([f"{folder}/libnvidia-ml.so.535.309.01"]) == "535.309.01"
    assert driver.library_version(["/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"]) == ""
    left = [f"{folder}/libnvidia-ml.so.535.309.01", "/usr/lib/libnvidia-ml.so.580.178.04"]
    assert driver.library_version(left, "580.178.04") == "580.178.04"
    assert driver.library_version(left, "570.1") == "535.309.01"
