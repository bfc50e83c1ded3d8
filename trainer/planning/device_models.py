"""Models of accelerators: one table, and the rows by the names that drivers report.

A name has a model and up to two more words: its memory (`A100-80G`) and its form
(`H100-80G-PCIe`). nvidia-smi and torch say `NVIDIA H100 PCIe`, `NVIDIA A100-SXM4-80GB`, `NVIDIA
GeForce RTX 4090 Laptop GPU`; Vulkan's RADV `AMD Radeon RX 6800 XT (RADV NAVI21)`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from trainer.system.backends import Backend
from trainer.system.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """One accelerator, or a processor."""

    name: str
    flops: float | None
    """A second, dense, in the 16-bit format that trains (fp32 on a processor); None: unknown."""
    memory: float
    """Bytes."""
    watts: float | None
    """Most power; None: unknown."""
    fp32: float | None = None
    """The same of an accelerator in fp32, by its matrix units only where they take it whole:
    torch rounds no product to TF32 unless it is told to. None: unknown."""
    nvlink: float | None = None
    """Bytes a second to the other devices of its host, in one direction."""
    source: str
    """Its maker and where the figures are from, or `assumed`."""

    @property
    def is_processor(self) -> bool:
        """Whether it is a host's processor."""
        return self.name.startswith("CPU")

    @property
    def backend(self) -> Backend:
        """The backend that computes on it."""
        return "cpu" if self.is_processor else "cuda" if self.computes_cuda else "wgpu"

    @property
    def computes_cuda(self) -> bool:
        """Whether it is a card of NVIDIA, or an unknown one, which may be."""
        return not self.is_processor and self.source.split(",")[0] in ("NVIDIA", "assumed")


def _make_device(
    name: str,
    teraflops: float | None,
    wide: float | None,
    gib: int,
    watts: float | None,
    source: str,
    nvlink: float = 0,
) -> DeviceModel:
    return DeviceModel(
        name=name,
        flops=teraflops and teraflops * 1e12,
        fp32=wide and wide * 1e12,
        memory=gib * 2**30,
        watts=watts,
        nvlink=nvlink * 1e9 or None,
        source=source,
    )


_NVIDIA = "NVIDIA, data sheet of the"
_AMD = "AMD, product page of the"
_TURING = "NVIDIA, Turing white paper, reference clocks, fp32 sums"
_AMPERE = "NVIDIA, GA102 white paper or product page: twice the fp32 rate, fp32 sums"
_ADA = "NVIDIA, Ada white paper or product page: twice the fp32 rate, fp32 sums"
_BLACKWELL = "NVIDIA, Blackwell white paper or product page: twice the fp32 rate, fp32 sums"
_APPLE = "Apple, newsroom; 16 bits as fp32, of unified memory"
# NVIDIA's SXM modules have no word for it in their names, their PCIe cards have.
DEVICES: dict[str, DeviceModel] = {
    device.name: device
    for device in (
        _make_device("V100-16G", 125, 15.7, 16, 300, f"{_NVIDIA} V100 SXM2", 150),
        _make_device("V100-16G-PCIe", 112, 14, 16, 250, f"{_NVIDIA} V100 PCIe"),
        _make_device("V100-32G-PCIe", 112, 14, 32, 250, f"{_NVIDIA} V100 PCIe"),
        _make_device("V100-32G", 125, 15.7, 32, 300, f"{_NVIDIA} V100 SXM2", 150),
        _make_device("T4", 65, 8.1, 16, 70, f"{_NVIDIA} T4"),
        _make_device("A100-40G", 312, 19.5, 40, 400, f"{_NVIDIA} A100 SXM", 300),
        _make_device("A100-80G", 312, 19.5, 80, 400, f"{_NVIDIA} A100 SXM", 300),
        _make_device("A100-40G-PCIe", 312, 19.5, 40, 250, f"{_NVIDIA} A100 PCIe", 300),
        _make_device("A100-80G-PCIe", 312, 19.5, 80, 300, f"{_NVIDIA} A100 PCIe", 300),
        _make_device("A10", 125, 31.2, 24, 150, f"{_NVIDIA} A10, without sparsity"),
        _make_device("A10G", 70, 35, 24, 300, f"{_NVIDIA} A10G, without sparsity"),
        _make_device("A30", 165, 10.3, 24, 165, f"{_NVIDIA} A30, without sparsity", 100),
        _make_device("A40", 149.7, 37.4, 48, 300, f"{_NVIDIA} A40, without sparsity", 56.25),
        _make_device("A6000", 154.8, 38.7, 48, 300, f"{_NVIDIA} RTX A6000", 56.25),
        _make_device("L4", 121, 30.3, 24, 72, f"{_NVIDIA} L4, without sparsity"),
        _make_device("L40", 181, 90.5, 48, 300, f"{_NVIDIA} L40, without sparsity"),
        _make_device("L40S", 362, 91.6, 48, 350, f"{_NVIDIA} L40S, without sparsity"),
        _make_device("H100-80G", 989, 67, 80, 700, f"{_NVIDIA} H100 SXM, without sparsity", 450),
        _make_device("H100-80G-PCIe", 756, 51, 80, 350, f"{_NVIDIA} H100 PCIe, no sparsity", 300),
        _make_device("H100-94G-NVL", 835, 60, 94, 400, f"{_NVIDIA} H100 NVL, no sparsity", 300),
        _make_device("H200-NVL", 835, 60, 141, 600, f"{_NVIDIA} H200 NVL, without sparsity", 450),
        _make_device("H200", 989, 67, 141, 700, f"{_NVIDIA} H200 SXM, without sparsity", 450),
        _make_device("B200", 2250, None, 180, 1000, f"{_NVIDIA} DGX B200, dense, no fp32", 900),
        _make_device("P40", None, 12, 24, 250, f"{_NVIDIA} Tesla P40, whose 16 bits are slow"),
        _make_device("P100", 18.7, 9.3, 16, 250, f"{_NVIDIA} Tesla P100 PCIe"),
        _make_device("A2000-12G", 31.9, 8, 12, 70, f"{_NVIDIA} RTX A2000, without sparsity"),
        _make_device("A2000-6G", 31.9, 8, 6, 70, f"{_NVIDIA} RTX A2000, without sparsity"),
        _make_device("A4000", 76.7, 19.2, 16, 140, f"{_NVIDIA} RTX A4000, without sparsity"),
        _make_device("A5000", 111.1, 27.8, 24, 230, f"{_NVIDIA} RTX A5000, no sparsity", 56.25),
        _make_device("RTX6000Ada", 364.2, 91.1, 48, 300, f"{_NVIDIA} RTX 6000 Ada, no sparsity"),
        _make_device("RTX5000Ada", 261.1, 65.3, 32, 250, f"{_NVIDIA} RTX 5000 Ada, no sparsity"),
        _make_device("RTX4000Ada", 106.9, 26.7, 20, 130, f"{_NVIDIA} RTX 4000 Ada, no sparsity"),
        _make_device("QuadroRTX6000", 130.5, 16.3, 24, 260, f"{_NVIDIA} Quadro RTX 6000", 50),
        _make_device("QuadroRTX8000", 130.5, 16.3, 48, 260, f"{_NVIDIA} Quadro RTX 8000", 50),
        _make_device("TitanRTX", 130.5, 16.3, 24, 280, "NVIDIA, Turing white paper, Titan RTX", 50),
        _make_device("RTX2060", 25.8, 6.5, 6, 160, _TURING),
        _make_device("RTX2070", 29.9, 7.5, 8, 175, _TURING),
        _make_device("RTX2080", 40.3, 10.1, 8, 215, _TURING, 25),
        _make_device("RTX2080Ti", 53.8, 13.4, 11, 250, _TURING, 50),
        _make_device("RTX3050", 18.2, 9.1, 8, 130, _AMPERE),
        _make_device("RTX3060-8G", 25.5, 12.7, 8, 170, _AMPERE),
        _make_device("RTX3060", 25.5, 12.7, 12, 170, _AMPERE),
        _make_device("RTX3060Ti", 32.4, 16.2, 8, 200, _AMPERE),
        _make_device("RTX3070", 40.6, 20.3, 8, 220, _AMPERE),
        _make_device("RTX3070Ti", 43.5, 21.7, 8, 290, _AMPERE),
        _make_device("RTX3080-12G", 61.3, 30.6, 12, 350, _AMPERE),
        _make_device("RTX3080", 59.5, 29.8, 10, 320, _AMPERE),
        _make_device("RTX3080Ti", 68.2, 34.1, 12, 350, _AMPERE),
        _make_device("RTX3090Ti", 80, 40, 24, 450, _AMPERE, 56.25),
        _make_device("RTX4060", 30.2, 15.1, 8, 115, _ADA),
        _make_device("RTX4060Ti-16G", 44.1, 22.1, 16, 165, _ADA),
        _make_device("RTX4060Ti-8G", 44.1, 22.1, 8, 160, _ADA),
        _make_device("RTX4070", 58.3, 29.1, 12, 200, _ADA),
        _make_device("RTX4070Super", 71, 35.5, 12, 220, _ADA),
        _make_device("RTX4070Ti", 80.2, 40.1, 12, 285, _ADA),
        _make_device("RTX4070TiSuper", 88.2, 44.1, 16, 285, _ADA),
        _make_device("RTX4080", 97.5, 48.7, 16, 320, _ADA),
        _make_device("RTX4080Super", 104.4, 52.2, 16, 320, _ADA),
        _make_device("RTX4090D", 147, 73.5, 24, 425, _ADA),
        _make_device("RTX5060", 38.4, 19.2, 8, 145, _BLACKWELL),
        _make_device("RTX5060Ti-8G", 47.4, 23.7, 8, 180, _BLACKWELL),
        _make_device("RTX5060Ti-16G", 47.4, 23.7, 16, 180, _BLACKWELL),
        _make_device("RTX5070", 61.7, 30.9, 12, 250, _BLACKWELL),
        _make_device("RTX5070Ti", 87.9, 43.9, 16, 300, _BLACKWELL),
        _make_device("RTX5080", 112.6, 56.3, 16, 360, _BLACKWELL),
        _make_device("RTX3090", 71, 35.6, 24, 350, "NVIDIA, GA102 white paper, fp32 sums", 56.25),
        _make_device("RTX4090", 165.2, 82.6, 24, 450, "NVIDIA, Ada white paper, fp32 sums"),
        _make_device("RTX5090", 209.5, 104.8, 32, 575, "NVIDIA, Blackwell white paper, fp32 sums"),
        _make_device("RX580", None, 6.2, 8, 185, f"{_AMD} RX 580, whose 16 bits are not faster"),
        _make_device("RX5700XT", 19.5, 9.75, 8, 225, f"{_AMD} RX 5700 XT"),
        _make_device("W5700X", 19, 9.5, 16, None, f"{_AMD} Radeon Pro W5700X"),
        _make_device("RX6700XT", 26.4, 13.2, 12, 230, f"{_AMD} RX 6700 XT"),
        _make_device("RX6800", 32.3, 16.2, 16, 250, f"{_AMD} RX 6800"),
        _make_device("RX6800XT", 41.5, 20.7, 16, 300, f"{_AMD} RX 6800 XT"),
        _make_device("RX6900XT", 46.1, 23, 16, 300, f"{_AMD} RX 6900 XT"),
        _make_device("RX7600", 43.5, 21.8, 8, 165, f"{_AMD} RX 7600"),
        _make_device("RX7800XT", 74.7, 37.3, 16, 263, f"{_AMD} RX 7800 XT"),
        _make_device("RX7900GRE", 92, 46, 16, 260, f"{_AMD} RX 7900 GRE"),
        _make_device("RX7900XT", 103.2, 51.6, 20, 315, f"{_AMD} RX 7900 XT"),
        _make_device("A770", 131, 17.2, 16, 225, "Intel, ARK of the Arc A770 16 GB"),
        _make_device("M1Ultra-64G", 21, 21, 64, None, _APPLE),
        _make_device("M1Ultra-128G", 21, 21, 128, None, _APPLE),
        _make_device("M2Ultra-64G", 27.2, 27.2, 64, None, _APPLE),
        _make_device("M2Ultra-128G", 27.2, 27.2, 128, None, _APPLE),
        _make_device("M2Ultra-192G", 27.2, 27.2, 192, None, _APPLE),
        _make_device("RX7900XTX", 122.8, 61.4, 24, 355, "AMD, product page of the RX 7900 XTX"),
        _make_device("MI250X", 383, 95.7, 128, 560, "AMD, data sheet of the MI250X", 350),
        _make_device("MI300X", 1307.4, 163.4, 192, 750, "AMD, data sheet of the MI300X", 448),
    )
}


def find_device(name: str, memory: float | None = None) -> DeviceModel:
    """Return the row of a device; case, `-`, spaces and a maker's words do not matter.

    Where a name without a size fits several rows, that nearest to `memory` (bytes) is taken, which
    a driver reports a few percent short; without it the one that has no size in its name, or the
    smallest.

    Raises:
        InputError: it is unknown, as a laptop's card is, which has a desktop card's name and not
            its speed; names the nearest ones.
    """
    wanted = _Name(name)
    rows = [(_Name(device.name), device) for device in DEVICES.values()]
    rows = [(row, device) for row, device in rows if row.model == wanted.model]
    if any(row.form for row, _ in rows):  # else all cards of the model have one form
        rows = [(row, device) for row, device in rows if row.form == wanted.form]
    if wanted.size:
        rows = [(row, device) for row, device in rows if row.size in (wanted.size, "")]
        rows.sort(key=lambda each: each[0].size == "")
    elif memory:
        rows.sort(key=lambda each: abs(each[1].memory - memory))
    else:
        rows.sort(key=lambda each: (each[0].size != "", each[1].memory))
    if rows:
        return rows[0][1]
    models = {_Name(known).model for known in DEVICES}
    close = difflib.get_close_matches(wanted.model, models, n=3, cutoff=0.4)
    near = ", ".join(known for known in DEVICES if _Name(known).model in close)
    near = f"near it: {near}" if near else f"known: {', '.join(DEVICES)}"
    raise InputError(f"unknown device {name}; {near}; any card by its memory: 8GB")


_SIZE = re.compile(r"(?<!\w)(\d+)\s*gi?b?\b")
_FORM = re.compile(r"\b(pcie|nvl)\b")
_SILENT = re.compile(
    r"radeon pro|intel|arc|graphics|apple|nvidia|geforce|amd|radeon|instinct|tesla|sxm\d?|hbm\d?e?"
    r"|generation|series"
)
"""Words of names that tell no models apart."""


class _Name:
    """The parts of a device's name."""

    def __init__(self, name: str) -> None:
        words = re.sub(r"\(r\)|\(tm\)|\(.*", "", name.lower().replace("-", " "))
        self.size = match[1] if (match := _SIZE.search(words)) else ""
        self.form = match[1] if (match := _FORM.search(words)) else ""
        words = _FORM.sub("", _SIZE.sub("", _SILENT.sub("", words.replace("rtx a", "a"))))
        self.model = re.sub(r"[^a-z0-9]", "", words)
