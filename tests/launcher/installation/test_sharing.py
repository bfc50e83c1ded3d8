"""What versions share by hard links, what uv changes, and what an interruption leaves."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.installation import environments
from tests.launcher.handmade import lock_of, make_uv, make_wheel
from tests.launcher.installation.small import Install, motley, running
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,  # each installation takes seconds
    pytest.mark.usefixtures("without_checkout"),
]


def packages(root: Path, version: str = "current") -> Path:
    """Return where a version keeps its packages."""
    (folder,) = (root / version).glob("lib/python*/site-packages")
    return folder


def test_equal_packages_are_linked_and_nothing_is_downloaded(
    tmp_path: Path, shelf: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    install("install", "--wheel", motley(tmp_path, "2.0"))
    old, new = packages(root, "previous"), packages(root)
    (bytecode,) = new.glob("__pycache__/leaf.*.pyc")
    for path in ("leaf.py", bytecode.relative_to(new), "../../../bin/uv"):
        assert (old / path).samefile(new / path)
    assert not (old / "launcher/__init__.py").samefile(new / "launcher/__init__.py")
    assert len(list(new.glob("motley-*.dist-info"))) == 1
    # The old version goes, the files that the new one has stay.
    install("install", "--wheel", motley(tmp_path, "3.0"))
    install("install", "--wheel", motley(tmp_path, "4.0"))
    assert running(root) == "4.0"
    assert (packages(root) / "leaf.py").stat().st_nlink == 2


def test_changed_packages_are_the_only_ones_that_are_downloaded(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    root = tmp_path / "root"
    install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    wheel = motley(tmp_path, "2.0", "twig")
    would = install("install", "--wheel", wheel, "--check")
    assert would["steps"][0] == "download packages"
    (shelf / "leaf-1.0-py3-none-any.whl").unlink()
    install("install", "--wheel", wheel)
    old, new = packages(root, "previous"), packages(root)
    assert (new / "twig.py").is_file()
    assert (old / "leaf.py").samefile(new / "leaf.py")
    assert not (old / "twig.py").exists()
    install("install", "--wheel", motley(tmp_path, "3.0"))  # which needs no twig
    assert not (packages(root) / "twig.py").exists()
    assert (packages(root, "previous") / "twig.py").is_file()


def test_another_file_of_the_same_release_is_taken(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    root = tmp_path / "root"
    install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    leaf = make_wheel(shelf, "leaf", "1.0", {"leaf.py": "other = 1"})
    lock = {"launcher/locks/coordinator.txt": lock_of(leaf)}
    install("install", "--wheel", motley(tmp_path, "2.0", files=lock))
    assert (packages(root) / "leaf.py").read_text() == "other = 1"
    assert (packages(root, "previous") / "leaf.py").read_text() == ""


def test_another_uv_is_brought_by_pip(tmp_path: Path, shelf: Path, install: Install) -> None:
    root = tmp_path / "root"
    install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    newer = lock_of(make_uv(shelf, "2.0"))
    install("install", "--wheel", motley(tmp_path, "2.0", uv=newer))
    assert not (root / "current/bin/uv").samefile(root / "previous/bin/uv")
    assert [path.name for path in packages(root).glob("uv-*")] == ["uv-2.0.dist-info"]
    assert [path.name for path in packages(root, "previous").glob("uv-*")] == ["uv-1.0.dist-info"]


def test_uv_that_no_index_offers_is_one_line(tmp_path: Path, shelf: Path, install: Install) -> None:
    for wheel in shelf.glob("uv-*"):
        wheel.unlink()
    failure = install(
        "install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator", code=1
    )
    assert failure["error"].startswith("pip install failed: ")
    assert "No matching distribution found for uv==1.0" in failure["error"]
    assert list((tmp_path / "root/versions").iterdir()) == []


def test_torch_comes_from_the_index_that_has_it(
    tmp_path: Path, shelf: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pip's own configuration, else of PyTorch's; a change of packages later asks neither."""
    root, index = tmp_path / "root", tmp_path / "index"
    torch = make_wheel(index / "torch", "torch", "2.0", {"torch.py": ""})
    (index / "torch/index.html").write_text(f'<a href="{torch.name}">{torch.name}</a>')
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    more = {f"launcher/locks/torch-{build}.txt": lock_of(torch) for build in ("cpu", "cuda")}
    first = motley(tmp_path, "1.0", extra="trainer", files=more)
    words = ("--extras", "trainer", "--torch", "cpu", "--torch-index", index.as_uri())
    assert "torch for cpu" in install("install", "--wheel", first, *words)["steps"][0]
    assert (packages(root) / "torch.py").is_file()
    second = motley(tmp_path, "2.0", "twig", extra="trainer", files=more)
    done = install("install", "--wheel", second, "--torch-index", (tmp_path / "none").as_uri())
    assert done["steps"][0] == "download packages"
    assert (packages(root) / "torch.py").samefile(packages(root, "previous") / "torch.py")
    cuda = install(
        "install", "--wheel", second, "--extras", "trainer", "--torch", "cuda", "--check"
    )
    assert cuda["version"] != done["version"]  # what `current` names is never remade


def test_a_host_of_the_former_layout_goes_on(tmp_path: Path, shelf: Path, install: Install) -> None:
    """Versions shared an environment: it goes with the last version that needs it."""
    root = tmp_path / "root"
    former, environment = root / "versions/0.9-0123456789ab", root / "environments/ba9876543210"
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    records = {
        former / "motley.json": {
            "schema": "motley.installation/1",
            "sha256": "01" * 32,
            "environment": environment.name,
            "python": python,
        },
        environment / "environment.json": {"extras": ["coordinator"], "torch": None},
    }
    for path, tree in records.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(tree))
    (root / "current").symlink_to(former.relative_to(root))
    assert install("show")["version"] == former.name
    first = install("install", "--wheel", motley(tmp_path, "1.0"))  # extras as before
    assert (first["previous"], running(root)) == (former.name, "1.0")
    assert environment.exists()
    assert install("rollback")["version"] == former.name
    second = install("install", "--wheel", motley(tmp_path, "2.0"))
    assert second["previous"] == former.name
    assert environment.exists()
    install("install", "--wheel", motley(tmp_path, "3.0"))
    assert not former.exists()
    assert not environment.parent.exists()


def test_an_installation_that_is_killed_leaves_the_version_that_ran(
    tmp_path: Path, shelf: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    first = install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    wheel = motley(tmp_path, "2.0", "twig")
    name = install("install", "--wheel", wheel, "--check")["version"]
    program = "import sys; from launcher.installation.install import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "install", "--root", root, "--wheel", wheel]
    with socket.create_server(("127.0.0.1", 0)) as index:  # it never answers
        address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        monkeypatch.delenv("PIP_NO_INDEX")
        environment = {**os.environ, "PIP_INDEX_URL": address}
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            connection, _ = index.accept()  # uv asks for twig
            os.killpg(process.pid, signal.SIGKILL)
            connection.close()
    assert (packages(root, f"versions/{name}") / "leaf.py").exists()  # it had begun
    wait_for(lambda: process.poll() is not None, "the end of the installation")
    assert (install("show")["version"], running(root)) == (first["version"], "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert install("install", "--wheel", wheel)["version"] == name
    assert (packages(root) / "twig.py").is_file()
    assert running(root) == "2.0"
    assert install("rollback")["version"] == first["version"]
    assert running(root) == "1.0"


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the root a file system that holds some versions of the small Motley."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    folder = tmp_path / "root"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs root that may mount: {mounted.stderr.strip()}")
    monkeypatch.setitem(environments._SIZES, None, 1e6)  # else it is refused before uv starts
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_while_uv_installs_leaves_the_version_that_ran(
    tmp_path: Path, small_disk: Path, shelf: Path, install: Install
) -> None:
    first = install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    noise = random.Random(0).randbytes(16 << 20)
    twig = make_wheel(shelf, "twig", "1.0", {"twig.py": "", "twig.bin": noise})
    leaf = shelf / "leaf-1.0-py3-none-any.whl"
    lock = {"launcher/locks/coordinator.txt": lock_of(leaf, twig)}
    wheel = motley(tmp_path, "2.0", files=lock)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - (8 << 20))

    failure = install("install", "--wheel", wheel, code=1)

    assert failure["error"].startswith("uv pip sync failed: "), failure
    assert "No space left on device" in str(failure)
    assert (install("show")["version"], running(small_disk)) == (first["version"], "1.0")
    assert len(list((small_disk / "versions").iterdir())) == 1
    ballast.unlink()
    assert install("install", "--wheel", wheel)["previous"] == first["version"]
    assert running(small_disk) == "2.0"
    assert (packages(small_disk) / "twig.bin").stat().st_size == len(noise)
    assert install("rollback")["version"] == first["version"]
    assert running(small_disk) == "1.0"
