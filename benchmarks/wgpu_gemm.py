"""Matrix products of the wgpu engine against torch on the CPU, in one run.

    python benchmarks/wgpu_gemm.py [--gpu 0] [--tokens 256] [--threads 2] [--repeats 5]
                                   [--peak TFLOPS] [--products NAME ...]

With a card's fp32 peak from its data sheet, a product of 1024 x 2560 x 9728 (in an MLP of Qwen3-4B)
and its share of the peak are measured too. Every figure is the best of several runs, ours and
torch's interleaved, so that other load affects both. Prints a table and writes
benchmarks/results/wgpu_gemm.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rig.report import RESULTS

from trainer.planning.vulkan_buffers import Kind
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter
from trainer.replica.wgpu.kernels.gemm.choice import choose_variant, list_candidates
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.gemm.variants import Product, Variant

RESULT = RESULTS / "wgpu_gemm.json"
LARGE, LARGE_PRODUCT = "1024x2560x9728", Product(False, True, "f32", 1024, 9728, 2560)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="", help="index, UUID, PCI address or name")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--products", nargs="+", metavar="NAME", help="only these of the table")
    parser.add_argument("--peak", type=float, help="fp32 TFLOP/s of the card")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = products(arguments.tokens)
    if unknown := set(arguments.products or ()) - set(asked):
        parser.error(f"--products {', '.join(sorted(unknown))}: known are {'; '.join(asked)}")
    asked = {name: asked[name] for name in arguments.products or asked}

    try:
        device = Device(select_adapter(arguments.gpu, allow_software=True))
    except DeviceError as error:
        print(f"skipped: {error}")
        return
    print(f"{device.adapter}, {device.adapter.driver}; torch on {arguments.threads} threads")
    report: dict[str, Any] = {
        "adapter": device.adapter.key,
        "machine": platform.machine(),
        "torch_threads": arguments.threads,
        "products": measure(device, asked, arguments.repeats),
    }
    if arguments.peak:
        row = measure(device, {LARGE: LARGE_PRODUCT}, arguments.repeats)[LARGE]
        share = row["gflops"][row["chosen"]] / (1000 * arguments.peak)
        print(f"{LARGE}: {share:.0%} of {arguments.peak:g} TFLOP/s")
        report |= {"large": row, "peak_tflops": arguments.peak, "share_of_peak": round(share, 3)}
    RESULT.write_text(json.dumps(report, indent=2) + "\n")


def products(tokens: int) -> dict[str, Product]:
    """Return the kinds of products in a layer of Qwen3-0.6B, LoRA of rank 16."""
    return {
        "linear, forward": Product(False, True, "f32", tokens, 3072, 1024),
        "linear, backward": Product(False, False, "f32", tokens, 1024, 3072),
        "linear, weights": Product(True, False, "f32", 3072, 1024, tokens),
        "bf16 linear, forward": Product(False, True, "bf16", tokens, 3072, 1024),
        "bf16 linear, backward": Product(False, False, "bf16", tokens, 1024, 3072),
        "NF4 linear, forward": Product(False, True, "nf4", tokens, 3072, 1024),
        "NF4 linear, backward": Product(False, False, "nf4", tokens, 1024, 3072),
        "LoRA A, forward": Product(False, True, "f32", tokens, 16, 1024),
        "LoRA A, gradient": Product(True, False, "f32", 16, 1024, tokens),
        "LoRA B, gradient": Product(True, False, "f32", 3072, 16, tokens),
        "scores": Product(False, True, "f32", 2 * tokens, tokens, 128),
        "head of 49,152, backward": Product(False, False, "bf16", tokens, 576, 49_152),
        "down, forward, 4B": Product(False, True, "bf16", tokens, 2560, 9728),
        "one token": Product(False, True, "nf4", 1, 3072, 1024),
    }


def measure(device: Device, chosen_products: dict[str, Product], repeats: int) -> dict[str, Any]:
    """Return GF/s of every variant for some products, and torch's in fp32."""
    rows: dict[str, Any] = {}
    for name, product in chosen_products.items():
        ways: dict[str, Callable[[], object]] = {"torch": torch_product(product)}
        for variant in list_candidates(product):
            ways[variant.name] = our_product(device, product, variant)
        seconds = best_of(ways, repeats)
        flops = 2e-9 * product.m * product.n * product.k
        gflops = {which: round(flops / took, 2) for which, took in seconds.items()}
        chosen = choose_variant(device, product).name
        ratio = seconds[chosen] / seconds["torch"]
        rows[name] = {
            "product": product.key,
            "gflops": gflops,
            "chosen": chosen,
            "ratio": round(ratio, 2),
        }
        ours = ", ".join(f"{which} {rate}" for which, rate in gflops.items() if which != "torch")
        print(f"{name:<22} torch {gflops['torch']:>7} GF/s, {ratio:.1f} times ours; {ours}")
    return rows


def our_product(device: Device, product: Product, variant: Variant) -> Callable[[], object]:
    """Return a function that multiplies once and waits for the result."""
    m, n, k = product.m, product.n, product.k
    kind: Kind = product.kind_b
    a = device.create_array((k, m) if product.trans_a else (m, k))
    b = device.create_array((n, k) if product.trans_b else (k, n), kind)
    c = device.create_array((m, n))
    graph = Graph(device)
    gemm(
        graph,
        a,
        b,
        c,
        m=m,
        n=n,
        k=k,
        trans_a=product.trans_a,
        trans_b=product.trans_b,
        variant=variant,
    )
    word = replace(c, shape=(1,))

    def once() -> object:
        graph.run()
        return device.read(word)

    return once


def torch_product(product: Product) -> Callable[[], object]:
    """Return the same product in torch, fp32."""
    m, n, k = product.m, product.n, product.k
    a = torch.randn((k, m)).T if product.trans_a else torch.randn((m, k))
    b = torch.randn((n, k)).T if product.trans_b else torch.randn((k, n))
    return lambda: a @ b


def best_of(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the minimal seconds of each, after a first run that compiles."""
    best = dict.fromkeys(candidates, float("inf"))
    for repeat in range(repeats + 1):
        for name, once in candidates.items():
            begin = time.perf_counter()
            once()
            if repeat > 0:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    main()
