"""Installing on a host: real environments, small wheels, and no index but a folder of wheels."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from launcher.installation import environments
from launcher.transfer.wheel import build_wheel
from tests import ROOT
from tests.launcher.handmade import make_wheel
from tests.launcher.installation.small import Install, motley, running, uv_lock
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,  # each installation takes seconds
    pytest.mark.usefixtures("without_checkout"),
]


def test_versions_follow_each_other(tmp_path: Path, shelf: Path, install: Install) -> None:
    root = tmp_path / "root"
    one, two, three = (motley(tmp_path / v, v) for v in ("1.0", "2.0", "3.0"))

    would = install("install", "--wheel", one, "--extras", "coordinator", "--check")
    assert would["changed"]
    assert [step.split()[0] for step in would["steps"]] == ["download", "install", "switch"]
    assert not root.exists()

    first = install("install", "--wheel", one, "--extras", "coordinator")
    assert first["changed"]
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    name = f"1.0-{first['sha256'][:12]}-coordinator-{python}"
    assert first["version"] == would["version"] == name
    assert running(root) == "1.0"

    again = install("install", "--wheel", one)
    assert not again["changed"]
    assert not install("install", "--wheel", one, "--check")["changed"]

    second = install("install", "--wheel", two)  # extras as before
    assert second["steps"] == [f"install {second['version']}", f"switch from {first['version']}"]
    assert second["previous"] == first["version"]
    assert running(root) == "2.0"

    back = install("rollback")
    assert (back["version"], back["previous"]) == (first["version"], second["version"])
    assert running(root) == "1.0"
    assert install("rollback")["version"] == second["version"]

    third = install("install", "--wheel", three)
    assert third["previous"] == second["version"]
    left = sorted(folder.name for folder in (root / "versions").iterdir())
    assert left == sorted([second["version"], third["version"]])
    shown = install("show")
    assert shown.pop("used_by") == []
    assert shown.items() <= (third | {"changed": False}).items()
    assert not (root / "tmp").exists()


def test_what_does_not_start_is_not_switched_to(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    good = install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    wheel = motley(tmp_path, "2.0", broken=True)
    failure = install("install", "--wheel", wheel, code=1)
    assert "does not start; nothing was switched" in failure["error"]
    assert any("nothing_like_it" in line for line in failure["details"])
    assert install("show")["version"] == good["version"]
    assert running(tmp_path / "root") == "1.0"


def test_nothing_beside_the_lock_is_installed(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    assert list(tmp_path.glob("root/current/lib/*/site-packages/leaf.py"))
    assert not list(tmp_path.glob("root/current/lib/*/site-packages/unlocked.py"))


def test_another_file_than_the_locked_one_is_refused(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    wheel = motley(tmp_path, "1.0")
    make_wheel(shelf, "leaf", "1.0", {"leaf.py": "print('tampered with')"})
    failure = install("install", "--wheel", wheel, "--extras", "coordinator", code=1)
    assert "Hash mismatch for `leaf==1.0`" in failure["error"]
    assert list((tmp_path / "root/versions").iterdir()) == []


def test_a_source_distribution_is_not_built(tmp_path: Path, shelf: Path, install: Install) -> None:
    """Building runs its code, and asks an index for tools that no lock names."""
    source = shelf / "bark-1.0.tar.gz"
    source.write_bytes(b"never looked at")
    lock = f"bark==1.0 --hash=sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}"
    files = {"launcher/locks/coordinator.txt": lock, "launcher/locks/uv.txt": uv_lock()}
    wheel = make_wheel(tmp_path, "motley", "1.0", files)
    failure = install("install", "--wheel", wheel, "--extras", "coordinator", code=1)
    assert "bark==1.0" in failure["error"]


def test_a_missing_package_leaves_nothing(tmp_path: Path, shelf: Path, install: Install) -> None:
    wheel = motley(tmp_path, "1.0", "no_such_package_on_the_shelf")
    failure = install("install", "--wheel", wheel, "--extras", "coordinator", code=1)
    assert "no_such_package_on_the_shelf" in failure["error"].replace("-", "_")
    assert "\n" not in failure["error"]
    assert list((tmp_path / "root/versions").iterdir()) == []
    assert install("show")["version"] is None


def test_what_an_interruption_left_is_removed(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    root, wheel = tmp_path / "root", motley(tmp_path, "1.0")
    would = install("install", "--wheel", wheel, "--extras", "coordinator", "--check")
    for torn in (
        root / "versions/elsewhere",
        root / "versions" / would["version"] / "bin",
        root / "tmp/pip-unpack",
    ):
        torn.mkdir(parents=True)
    (root / ".current.new").symlink_to("versions/nowhere")
    done = install("install", "--wheel", wheel, "--extras", "coordinator")
    assert done["version"] == would["version"]
    assert running(root) == "1.0"
    assert not (root / "versions/elsewhere").exists()
    assert not (root / "tmp").exists()


def test_a_version_whose_python_is_gone_is_made_again(
    tmp_path: Path, shelf: Path, install: Install
) -> None:
    root, wheel = tmp_path / "root", motley(tmp_path, "1.0")
    first = install("install", "--wheel", wheel, "--extras", "coordinator")
    python = root / "versions" / first["version"] / "bin/python3"
    for name in ("python", "python3"):
        (python.parent / name).unlink(missing_ok=True)
        (python.parent / name).symlink_to("/nonexistent/python3.11")
    assert install("install", "--wheel", wheel)["changed"]
    assert running(root) == "1.0"


def test_two_at_once(tmp_path: Path, shelf: Path, install: Install) -> None:
    (tmp_path / "root").mkdir()
    with (tmp_path / "root/.lock").open("w") as held:
        held.write("pid 4711")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        wheel = motley(tmp_path, "1.0")
        failure = install("install", "--wheel", wheel, "--extras", "coordinator", code=4)
    assert "another installation is running (pid 4711)" in failure["error"]


def test_a_run_is_not_changed_under_its_feet(tmp_path: Path, shelf: Path, install: Install) -> None:
    root = tmp_path / "root"
    install("install", "--wheel", motley(tmp_path, "1.0"), "--extras", "coordinator")
    install("install", "--wheel", motley(tmp_path, "2.0"))
    oldest = install("show")["previous"]
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [
        root / "current/bin/python",
        "-c",
        code,
        "launcher.session",
        "--instance",
        "r:worker-0",
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as supervisor:
        assert supervisor.stdout
        assert supervisor.stdin
        assert supervisor.stdout.readline() == "up\n"
        wheel = motley(tmp_path, "3.0")
        for arguments in (("install", "--wheel", wheel), ("rollback",)):
            failure = install(*arguments, code=4)
            assert "a run uses it" in failure["error"]
            assert f"pid {supervisor.pid}: " in failure["details"][0]
        assert not install("install", "--wheel", motley(tmp_path, "2.0"))["changed"]
        forced = install("install", "--wheel", wheel, "--force")
        assert forced["version"].startswith("3.0-")
        assert (root / "versions" / oldest).exists()  # nothing is removed beside a run
        supervisor.stdin.close()
    wait_for(lambda: supervisor.poll() is not None, "the supervisor to leave")
    install("install", "--wheel", motley(tmp_path, "4.0"))
    assert not (root / "versions" / oldest).exists()


def test_mistakes_are_one_line(tmp_path: Path, shelf: Path, install: Install) -> None:
    wheel = motley(tmp_path, "1.0")
    assert "name --extras" in install("install", "--wheel", wheel, code=2)["error"]
    assert (
        "no lock for nonsense"
        in (install("install", "--wheel", wheel, "--extras", "nonsense", code=2)["error"])
    )
    assert "No such file" in install("install", "--wheel", tmp_path / "x.whl", code=2)["error"]
    (tmp_path / "x.whl").write_bytes(b"torn")
    assert "not a wheel" in install("install", "--wheel", tmp_path / "x.whl", code=2)["error"]
    other = shelf / "leaf-1.0-py3-none-any.whl"
    assert "a wheel of leaf" in install("install", "--wheel", other, code=2)["error"]
    assert "no previous version" in install("rollback", code=2)["error"]


def test_what_stands_in_the_way_is_named(tmp_path: Path, shelf: Path, install: Install) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/versions").write_text("no folder")
    wheel = motley(tmp_path, "1.0")
    failure = install("install", "--wheel", wheel, "--extras", "coordinator", code=4)
    assert failure["error"] == f"{tmp_path}/root/versions: File exists"


def test_no_room(
    tmp_path: Path, shelf: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environments._SIZES, None, 1e18)
    wheel = motley(tmp_path, "1.0")
    failure = install("install", "--wheel", wheel, "--extras", "coordinator", code=4)
    assert "GB free, the packages take about 1000000000.0 GB" in failure["error"]


@pytest.mark.long
def test_the_real_wheel_installs_itself(tmp_path: Path) -> None:
    wheel = build_wheel(ROOT, tmp_path).path
    command = [sys.executable, "-P", "-m", "launcher.installation", "install", "--wheel", wheel]
    result = subprocess.run(
        [*command, "--root", tmp_path / "root", "--extras", "coordinator"],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    # With bytecode, since a unit may not write any: of what nobody imported here, too.
    assert list(tmp_path.glob("root/current/lib/*/site-packages/safetensors/*/torch.*.pyc"))
    trainer = [tmp_path / "root/current/bin/trainer", "--help"]
    assert b"finetune" in subprocess.run(trainer, capture_output=True, check=True).stdout
    # What a package index refuses, or shows; and that others' checkers read our types.
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (card,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        tree = Metadata.from_email(packed.read(card), validate=True)
    assert {"launcher/py.typed", "trainer/py.typed"} <= set(names)
    assert tree.license_expression == "Apache-2.0"
    assert tree.description_content_type == "text/markdown"
    assert tree.description == (ROOT / "README.md").read_text()
    # The passes in C are compiled on the host, if it can, and are not in the wheel.
    assert not [name for name in names if name.endswith(".library")]
    compiled = list(tmp_path.glob("root/current/lib/*/site-packages/trainer/**/*.library"))
    assert len(compiled) == (shutil.which("cc") is not None)
