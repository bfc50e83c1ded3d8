"""Wheels written by hand: small ones, without setuptools."""

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distribution
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str | bytes], *metadata: str
) -> Path:
    """Write a wheel by hand; further lines go into its metadata."""
    info = f"{name}-{version}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {**files, f"{info}/METADATA": "\n".join(headers) + "\n", f"{info}/WHEEL": tag}
    records = [f"{info}/RECORD,,"]
    for path, text in files.items():
        data = text.encode() if isinstance(text, str) else text
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        records.append(f"{path},sha256={digest.decode()},{len(data)}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": "\n".join(records) + "\n"}.items():
            # A ZipInfo of its own: the clock would make another wheel of the same files.
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
            archive.writestr(entry, text)
    return target


def lock_of(*wheels: Path) -> str:
    """Return a lock of these wheels."""
    lines: list[str] = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{digest}\n    # via motley\n")
    return "".join(lines)


@cache
def uv_program() -> bytes:
    """Return the program of this environment's uv."""
    files = distribution("uv").files or []
    (program,) = [file for file in files if file.parts[-2:] == ("bin", "uv")]
    return Path(str(program.locate())).read_bytes()


def make_uv(folder: Path, version: str = "1.0") -> Path:
    """Write a wheel of this environment's uv, under a version of its own."""
    return make_wheel(folder, "uv", version, {f"uv-{version}.data/scripts/uv": uv_program()})
