"""Attention of the wgpu engine in one kernel against windows of scores, in one run.

    python benchmarks/wgpu_attention.py [--gpu 0] [--lengths 256,512,1024,2304] [--repeats 5]

Heads are those of Qwen3-0.6B. Every figure is the minimum of several interleaved runs. The CPU
seconds of this process are reported beside the wall clock: on a software device they are the
work, also on a busy machine. Prints a table and writes
benchmarks/results/wgpu_attention.json.
"""

from __future__ import annotations

import argparse
import json
import time
from unittest.mock import patch

from rig.report import RESULTS

from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import Pool
from trainer.replica.wgpu.gpu.vulkan_adapter import select
from trainer.replica.wgpu.layers import attention
from trainer.replica.wgpu.layers.attention import Attention

RESULT = RESULTS / "wgpu_attention.json"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="", help="index, UUID, PCI address or name")
    parser.add_argument("--lengths", default="256,512,1024,2304")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    try:
        device = Device(select(arguments.gpu, allow_software=True))
    except DeviceError as error:
        print(f"skipped: {error}")
        return
    print(f"{device.adapter}, {device.adapter.driver}; milliseconds, wall / CPU")
    rows = [
        measure(device, int(length), arguments.repeats) for length in arguments.lengths.split(",")
    ]
    RESULT.parent.mkdir(exist_ok=True)
    report = {"adapter": device.adapter.key, "lengths": rows}
    RESULT.write_text(json.dumps(report, indent=2) + "\n")


def measure(device: Device, length: int, repeats: int) -> dict[str, float]:
    """Return the seconds of each kind, and one kernel's share of the whole with windows."""
    graphs, probe = record(device, length), device.array((1,))
    wall = dict.fromkeys(graphs, float("inf"))
    work = dict(wall)
    for _ in range(repeats + 1):  # the first one compiles
        for name, graph in graphs.items():
            began, busy = time.perf_counter(), time.process_time()
            graph.run()
            device.read(probe)  # waits
            wall[name] = min(wall[name], time.perf_counter() - began)
            work[name] = min(work[name], time.process_time() - busy)
    shares = {
        clock: (found["one kernel"] + found["backward"]) / (found["windows"] + found["backward"])
        for clock, found in (("wall", wall), ("CPU", work))
    }
    figures = ", ".join(f"{n} {1e3 * wall[n]:.0f} / {1e3 * work[n]:.0f}" for n in graphs)
    print(
        f"T={length}: {figures}; one kernel and backward take {shares['wall']:.2f} /"
        f" {shares['CPU']:.2f} of windows and backward",
        flush=True,
    )
    return {
        "length": length,
        **{f"{name}, wall": seconds for name, seconds in wall.items()},
        **{f"{name}, CPU": seconds for name, seconds in work.items()},
    }


def record(device: Device, length: int) -> dict[str, Graph]:
    """Return the recordings; if one kernel is not possible, both forwards are windows."""
    shape, pool = Attention(1, 16, 8, length, 128), Pool(device)
    queries, keys = (1, 16, length, 128), (1, 8, length, 128)
    q, k, v, dout, out, dq, dk, dv = (
        pool.take(size) for size in (queries, keys, keys, queries, queries, queries, keys, keys)
    )
    graphs = {name: Graph(device) for name in ("one kernel", "windows", "backward")}
    shape.forward(graphs["one kernel"], pool, q, k, v, out)
    with patch.object(attention, "serves", lambda *_: False):
        shape.forward(graphs["windows"], pool, q, k, v, out)
    shape.backward(graphs["backward"], pool, q, k, v, dout, dq, dk, dv)
    return graphs


if __name__ == "__main__":
    main()
