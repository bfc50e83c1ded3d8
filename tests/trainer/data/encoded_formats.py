"""Rows of each shape, and files of each format with them."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def rows(count: int = 300) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = []
    for n in range(count):
        turns = [{"role": "user", "content": f"What is {n % 90}?"}]
        turns += [{"role": "assistant", "content": f"It is <|im_end|> {n}. " * (1 + n % 5)}]
        kinds.append({"messages": turns, "odd": n} if n % 3 else {"messages": turns * 2})
        kinds.append({"text": f"Text {n % 100} ü"})
        kinds.append({"prompt": f"Ask {n}: ", "completion": f"answer {n} " * (1 + n % 30)})
    return kinds


def labelled(count: int) -> list[dict[str, Any]]:
    """Texts of three classes; some occur again, some with another label."""
    words = ("good", "bad", "odd")
    return [
        {"text": f'It is "{n % 70}",\nreally.' + " so" * (n % 60), "label": words[n % 3]}
        for n in range(count)
    ]


def preferences(count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for n in range(count):
        found.append({"prompt": f"Ask {n}", "chosen": f" yes {n}" * (n % 30), "rejected": " no"})
        found[-1]["chosen"] += "!"
        if n % 2:
            turns = {"chosen": "Yes <|im_end|>.", "rejected": "No." * (1 + n % 30)}
            found[-1] = {"prompt": [{"role": "user", "content": f"Is it {n % 40}?"}]}
            found[-1] |= {k: [{"role": "assistant", "content": v}] for k, v in turns.items()}
    return found


def texts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Ask {n}: ", "completion": f"answer {n % 70} ü" * 9} for n in range(count)]


def conversations(count: int) -> list[dict[str, Any]]:
    return [row for row in rows(count) if "messages" in row]


def write_as(path: Path, found: list[dict[str, Any]]) -> Path:
    """Write rows in the format that a path's suffix names; without one a folder of two files."""
    lines = "".join(json.dumps(row) + "\n" for row in found)
    half = len(found) // 2
    match path.suffix:
        case ".csv":
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, list(found[0]))
                table.writeheader()
                table.writerows(found)
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(found), path)
        case ".arrow":
            table = pa.Table.from_pylist(found)
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        case ".json":
            path.write_text(json.dumps(found))
        case ".txt":
            path.write_text("\n\n".join(row["text"] for row in found))
        case ".gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case ".zst":
            path.write_bytes(pa.compress(lines.encode(), "zstd", asbytes=True))
        case ".jsonl":
            path.write_text(lines)
        case _:
            path.mkdir()
            write_as(path / "train-0.jsonl.gz", found[:half])
            write_as(path / "train-1.parquet", found[half:])
    return path
