"""What a card can do at most: copies within it and to it, and products of matrices.

    python benchmarks/ceilings.py [--device cuda|cpu] [--size 8192] [--mib 1024]

Figures: GB/s of a copy on the device (each byte is read and written), of copies from the host's
memory, pinned and pageable, and TFLOP/s of SIZE x SIZE products in bf16, in fp32 with tf32 and in
plain fp32. Each is the median of several. From these the largest speeds of training follow, and the
tokens a pass from which on streaming a layer costs nothing. `--device cpu` is a rehearsal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rig.report import Ratio, Report, skip

REPEATS = 7


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--mib", type=int, default=1024)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        skip("no CUDA device; --device cpu is a rehearsal")
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    report = Report("ceilings")
    measure_copies(report, device, name, options.mib << 20)
    measure_products(report, device, name, options.size)
    return report.write()


def measure_copies(report: Report, device: torch.device, name: str, size: int) -> None:
    """Add GB/s of copies of `size` bytes on the device, and from pinned and pageable memory."""
    there = torch.empty(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    kinds: dict[str, tuple[torch.Tensor, int]] = {"on the device": (other, 2)}
    kinds["from pageable memory"] = torch.empty(size, dtype=torch.uint8), 1
    if device.type == "cuda":
        kinds["from pinned memory"] = torch.empty(size, dtype=torch.uint8, pin_memory=True), 1
    for kind, (source, touched) in kinds.items():
        source.fill_(1)  # a page that was never written is no memory yet
        seconds = time_on(device, lambda source=source: there.copy_(source))
        rate = touched * size / seconds / 1e9
        report.add(Ratio(f"copy {kind}, GB/s on {name}", rate, "1 GB/s"), seconds=seconds)


def measure_products(report: Report, device: torch.device, name: str, size: int) -> None:
    """Add TFLOP/s of square products in three precisions."""
    for label, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
        ("fp32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        left = torch.randn(size, size, device=device, dtype=dtype)
        right = torch.randn(size, size, device=device, dtype=dtype)
        out = torch.empty_like(left)
        seconds = time_on(device, lambda: torch.mm(left, right, out=out))  # noqa: B023 - called here
        rate = 2 * size**3 / seconds / 1e12
        report.add(Ratio(f"product in {label}, TFLOP/s on {name}", rate, "1 TFLOP/s"), size=size)


def time_on(device: torch.device, work: Callable[[], object]) -> float:
    """Return the median of the seconds that a piece of work takes on a device."""
    found: list[float] = []
    for _ in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return median(found[2:])  # the first ones choose kernels and fill caches


if __name__ == "__main__":
    raise SystemExit(main())
