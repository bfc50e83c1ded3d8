"""Codecs by name."""

import re

import numpy as np
import pytest

from tests import ROOT
from trainer.config.codec import CODECS
from trainer.exchange.protocol.codecs import make_codec
from trainer.system.errors import InputError

SIZE = 1440


@pytest.mark.parametrize("name", CODECS)
def test_each_name_is_its_codecs_and_decodes_what_it_encodes(name: str) -> None:
    codec = make_codec(name)
    assert codec.name == name
    values = np.zeros(SIZE, np.float32)
    values[[3, 700]] = 1.0, -2.0
    out = np.full(SIZE, 777, np.float32)
    encoded = codec.encode(values)
    assert encoded.nbytes == codec.encoded_size(SIZE)
    codec.decode(encoded, out)
    np.testing.assert_allclose(out, values, atol=0.2)


def test_auto_is_int8_where_it_is_not_bf16() -> None:
    assert make_codec("auto").name == "int8"


def test_the_pages_list_every_codec_with_its_bytes_and_its_number_on_the_wire() -> None:
    page = (ROOT / "docs" / "low-bandwidth.md").read_text(encoding="utf-8")
    table = page.split("| codec | a value becomes |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"`{name}`" for name in CODECS]
    for (name, kind), row in zip(CODECS.items(), rows, strict=True):
        assert float(row[2]) == pytest.approx(kind.element_bytes, abs=5e-4), name
    ids = [make_codec(name).id for name in CODECS]
    assert sorted(ids) == list(range(len(CODECS)))
    wire = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    numbers = re.search(r"of tensor payloads: ([^;]+);", wire)
    assert numbers
    assert re.findall(r"(\d+) ", numbers[1]) == [str(number) for number in sorted(ids)]
    settings = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `exchange\.codec` \| text \|.*", settings, re.MULTILINE)
    assert [name for name in CODECS if f"`{name}" not in row] == []


@pytest.mark.parametrize("name", ["", "int16", "topk:0.1", "int8:2", "INT8"])
def test_another_name_is_an_error_that_lists_them(name: str) -> None:
    with pytest.raises(InputError, match=f"use one of auto, {', '.join(CODECS)}"):
        make_codec(name)
