"""Codecs by name."""

import re

import numpy as np
import pytest

from tests import ROOT
from tests.trainer.exchange.protocol.compression.layouts import one_block
from trainer.config.codec import CODECS, NAMES, read_codec
from trainer.exchange.protocol.compression.choice import codecs_for, make_codec
from trainer.system.errors import InputError

LAYOUT = one_block((16, 40), (50, 16))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_its_codecs_and_decodes_what_it_encodes(name: str) -> None:
    (codec,) = codecs_for(name, LAYOUT)
    assert codec.name == name
    values = np.zeros(LAYOUT.size, np.float32)
    values[[3, 700]] = 1.0, -2.0
    out = np.full(LAYOUT.size, 777, np.float32)
    encoded = codec.encode(0, values)
    assert encoded.nbytes == codec.nbytes(LAYOUT.size)
    codec.decode(encoded, out)
    np.testing.assert_allclose(out, values, atol=0.2)


@pytest.mark.parametrize("name", ["topk:0.5", "topk:0.025", "topk:0.000001", "powersgd:16"])
def test_another_density_or_rank_keeps_its_name(name: str) -> None:
    assert codecs_for(name, LAYOUT)[0].name == name


def test_auto_is_int8_where_it_is_not_bf16() -> None:
    assert codecs_for("auto", LAYOUT)[0].name == "int8"


def test_the_pages_list_every_codec_with_its_bytes_and_its_number_on_the_wire() -> None:
    page = (ROOT / "docs" / "low-bandwidth.md").read_text(encoding="utf-8")
    table = page.split("| codec | a value becomes |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"`{name}`" for name in NAMES]
    for name, row in zip(NAMES, rows, strict=True):
        each = read_codec(name).element_bytes
        assert each is None or float(row[2]) == pytest.approx(each, abs=5e-4), name
    ids = [make_codec(next(iter(kind.names)), [(16, 40)]).id for kind in CODECS.values()]
    assert sorted(ids) == list(range(len(CODECS)))
    wire = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    numbers = re.search(r"of tensor payloads: ([^;]+);", wire)
    assert numbers
    assert re.findall(r"(\d+) ", numbers[1]) == [str(number) for number in sorted(ids)]
    settings = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    (row,) = (line for line in settings.splitlines() if line.startswith("| `exchange.codec` |"))
    assert [name for name in CODECS if f"`{name}" not in row] == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int16",
        "topk",
        "topk:0",
        "topk:0.0",
        "topk:0.6",
        "topk:-0.1",
        "topk:nan",
        "topk:1e-2",
        "powersgd:0",
        "powersgd",
        "powersgd:-1",
        "INT8",
    ],
)
def test_another_name_is_an_error_that_lists_them(name: str) -> None:
    with pytest.raises(InputError, match=r"topk:0\.1"):
        codecs_for(name, LAYOUT)


def test_powersgd_is_refused_for_adapters_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"rank 16 already, so rank 4 is at least 0\.25"):
        read_codec("powersgd:4", lora_rank=16)
    assert read_codec("topk:0.1", lora_rank=16)
