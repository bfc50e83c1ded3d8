"""Query `nvidia-smi` for NVIDIA's cards, and parse its output.

Standard library only: the launcher reads it on every host, and so do the recipes' filters.
"""

from __future__ import annotations

_MIB = 1 << 20


def query_command(*fields: str) -> list[str]:
    """Return the command that prints these fields of every card, a line each."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def parse_output(output: str, *fields: str) -> tuple[list[dict[str, str]], list[str]]:
    """Return the cards, each with its fields by name, and the lines that describe none.

    A line with another number of fields, or with an error in place of the UUID, describes none.
    """
    cards: list[dict[str, str]] = []
    others: list[str] = []
    for line in filter(None, map(str.strip, output.splitlines())):
        values = [value.strip() for value in line.split(",")]
        card = dict(zip(fields, values, strict=False))
        if len(values) == len(fields) and card.get("uuid", "GPU-").startswith("GPU-"):
            cards.append(card)
        else:
            others.append(line)
    return cards, others


def parse_integer(value: str) -> int | None:
    """Return a whole number; None for `[N/A]`, which a card without that reading has."""
    return int(value) if value.isdecimal() else None


def parse_decimal(value: str) -> float | None:
    """Return a number with a fraction, such as watts; None for `[N/A]`."""
    return float(value) if value.replace(".", "", 1).isdecimal() else None


def parse_mebibytes(value: str) -> int | None:
    """Return bytes, which come in MiB; None for `[N/A]`, as on boards with shared memory."""
    found = parse_integer(value)
    return None if found is None else found * _MIB
