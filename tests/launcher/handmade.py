"""Wheels written by hand: small ones, without setuptools."""

import base64
import hashlib
import zipfile
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], *metadata: str
) -> Path:
    """Write a wheel by hand; further lines go into its metadata."""
    info = f"{name}-{version}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {**files, f"{info}/METADATA": "\n".join(headers) + "\n", f"{info}/WHEEL": tag}
    records = [f"{info}/RECORD,,"]
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        records.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": "\n".join(records) + "\n"}.items():
            # A ZipInfo of its own: the clock would make another wheel of the same files.
            archive.writestr(zipfile.ZipInfo(path), text)
    return target


def lock_of(*wheels: Path) -> str:
    """Return a lock of these wheels."""
    lines: list[str] = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{digest}\n    # via motley\n")
    return "".join(lines)
