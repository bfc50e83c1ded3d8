"""Safetensors headers: whole files are read, damaged ones named, nothing allocated on a claim."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from trainer.model.safetensors_headers import read_config, read_file_headers, read_headers
from trainer.system.errors import InputError


def write(path: Path, header: object, body: bytes, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + body)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_offsets_from_the_start_of_the_file(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry([2], 0, 8), "b": entry([], 8, 12)}
    path = write(tmp_path / "model.safetensors", header, b"12345678abcd")
    headers = read_headers(tmp_path)
    assert headers["a"].shape == (2,)
    assert headers["b"].shape == ()
    assert path.read_bytes()[headers["b"].begin : headers["b"].end] == b"abcd"


def test_truncation_at_every_byte_is_an_input_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"a": entry([2], 0, 8)}, b"12345678").read_bytes()
    path = tmp_path / "model.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"model\.safetensors: "):
            read_headers(tmp_path)


def test_a_huge_claimed_header_allocates_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {}, b"", length=2**40)
    tracemalloc.start()
    with pytest.raises(InputError, match="damaged or truncated"):
        read_file_headers(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b"[" * 5000,
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": entry([2], 0, 4)},
        {"a": entry([-2], 0, 8)},
        {"a": entry([2], 8, 0)},
        {"a": entry([2], 0, 8, dtype="F31")},
        {"a": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}},
        {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
    ],
)
def test_damaged_headers(tmp_path: Path, header: object) -> None:
    write(tmp_path / "model.safetensors", header, b"12345678")
    with pytest.raises(InputError, match=r"damaged safetensors header"):
        read_headers(tmp_path)


def test_sharded_index(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": entry([1], 0, 4)}, b"1234")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert read_headers(tmp_path)["a"].file.name == "one.safetensors"
    for weight_map, message in (
        ({"b": "one.safetensors"}, "b is missing"),
        ({"a": "../one.safetensors"}, "outside the model directory"),
        ({"a": "two.safetensors"}, "no such file"),
        ({}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InputError, match=message):
            read_headers(tmp_path)


def test_missing_folder_and_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such model directory"):
        read_config(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_config(tmp_path)
