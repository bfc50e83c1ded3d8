"""One rank of gloo's ring all-reduce: `python -m rig.ring RANK WORLD ADDRESS ELEMENTS CODEC STEPS`.

Prints the seconds of every step at the slowest rank, as one JSON line of rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

WARM_UP = 3


def main() -> None:
    """Take part in the all-reduces that the command line describes."""
    rank, world, address, elements, codec, steps = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # it would take the loopback
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(world)
    )
    dtype = torch.float32 if codec == "fp32" else torch.bfloat16
    gradient = torch.full((int(elements),), 0.1, dtype=dtype)
    seconds: list[float] = []
    for _ in range(WARM_UP + int(steps)):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradient)
        seconds.append(time.perf_counter() - began)
        gradient.fill_(0.1)
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == "0":
        print(json.dumps({"event": "ring", "seconds": slowest.tolist()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()  # without it every other exit is a SIGABRT


if __name__ == "__main__":
    main()
