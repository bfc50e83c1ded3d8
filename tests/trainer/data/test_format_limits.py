"""What would take much memory, disk or time to read is refused at once, in one line."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest

from tests.trainer.data.test_formats import TEXT, read, zipped
from trainer.data.records import DataError
from trainer.system.errors import InputError


def test_what_asks_for_much_memory_or_disk_to_unpack_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.xz"
    content = bytearray(lzma.compress(TEXT.encode()))
    size = 4 * (content[12] + 1)  # of the block's header, which ends with its checksum
    assert content[14:16] == b"\x21\x01"  # LZMA2
    content[16] = 36  # a dictionary of 1 GiB
    content[8 + size : 12 + size] = zlib.crc32(content[12 : 8 + size]).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"needs more than 128 MiB to be unpacked; pack it with"):
        read(path)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.jsonl", TEXT)
    path = tmp_path / "a.zip"
    path.write_bytes(packed.getvalue())
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be unpacked: it is packed with LZMA"):
        read(path)
    path = tmp_path / "a.zip.gz"
    path.write_bytes(gzip.compress(zipped(os.urandom(3 << 20))))
    full = shutil.disk_usage(tmp_path)._replace(free=2 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(InputError, match="takes more than half of the space in"):
        read(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b",".join(b"c%d" % n for n in range(1_000_000)) + b"\n",
            "the header has 1,000,000 columns; at most 10,000 are read",
        ),
        (
            b",".join(b"c%d" % (n % 9_999) for n in range(10_000)) + b"\n",
            "the header has the column 'c0' twice",
        ),
        (b"input,\x1b[31mx,\x1b[31mx\n", r"the column '\x1b[31mx' twice"),
        (
            b"{" + b",".join(b'"c%d":0' % (n % 799_999) for n in range(800_000)) + b"}\n",
            "has the key 'c0' twice",
        ),
    ],
    ids=["many", "twice", "escapes", "keys"],
)
def test_names_of_columns_that_are_many_or_no_text_are_refused_at_once(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / ("a.jsonl" if content[:1] == b"{" else "a.csv")
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert problem in str(caught.value)
    assert str(caught.value).isprintable()
