"""Whoever asks nvidia-smi reads its answer with one reader."""

from pathlib import Path

from trainer.system import nvidia_smi

ROOT = Path(__file__).parents[3]


def test_cards_and_what_is_none() -> None:
    output = """
    GPU-1, 00000000:01:00.0, 11264
    [Unknown Error], 00000000:02:00.0, 1
    No devices were found
    """
    cards, others = nvidia_smi.parse_output(output, "uuid", "pci.bus_id", "memory.free")
    assert cards == [{"uuid": "GPU-1", "pci.bus_id": "00000000:01:00.0", "memory.free": "11264"}]
    assert others == ["[Unknown Error], 00000000:02:00.0, 1", "No devices were found"]


def test_readings() -> None:
    assert nvidia_smi.parse_integer("98") == 98
    assert nvidia_smi.parse_mebibytes("2") == 2 << 20
    assert nvidia_smi.parse_integer("[N/A]") is nvidia_smi.parse_mebibytes("[N/A]") is None


def test_there_is_one_reader() -> None:
    sources = [path for top in ("launcher", "trainer") for path in (ROOT / top).rglob("*.py")]
    asking = [path.name for path in sources if "--query-gpu" in path.read_text("utf-8")]
    assert asking == ["nvidia_smi.py"]
