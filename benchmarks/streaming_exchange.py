"""A base that is read layer by layer: the exchange that backward does not hide, by order.

    python benchmarks/streaming_exchange.py [--rate 100] [--micro-batches 8] [--rows 4] [--steps 5]

A coordinator and a worker on two hosts in network namespaces, the link shaped to the rate both
ways; real processes, mutual TLS. The worker trains adapters on a random model of which no layer
stays, once layer by layer over all micro-batches of a step, and once micro-batch after micro-batch,
where only the last one's backward hides the exchange. A slow machine needs fewer rows, or that
backward is long enough. Needs root. JSON:
benchmarks/results/streaming-exchange.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from exchange import write_certificates
from rig.report import Ratio, Report, skip

from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec
from benchmarks.rig.network import ShapedNetwork, missing
from benchmarks.rig.random_model import write_model
from benchmarks.rig.training import VOCABULARY

WARM_UP = 2
TARGET = 0.5
TREE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
"""56 million weights, and at rank 32 adapters of 21 MB."""
SETTINGS: dict[str, object] = {
    "method": "lora",
    "lora.lora_rank": 32,
    "model.resident": 0,
    "model.quantization": "none",
    "model.dtype": "float32",
    "training.gradient_checkpointing": "on",
    "exchange.codec": "fp32",
}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch, of 32 tokens")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    end_on_terminate()
    if reason := missing():
        skip(reason)
    report = Report("streaming-exchange")
    with (
        ShapedNetwork(2, options.rate * 10**6) as network,
        tempfile.TemporaryDirectory() as scratch,
    ):
        folder = Path(scratch)
        model = folder / "model"
        model.mkdir()
        write_model(model, TREE, "F32")
        write_certificates(folder, 1, [network.address(0)])
        spec = MemberSpec(
            role="worker",
            elements=0,
            workers=1,
            batch=options.micro_batches * options.rows,
            steps=WARM_UP + options.steps,
            address=(network.address(0), 0),
            settings=SETTINGS | {"training.micro_batch_size": options.rows},
            model=str(model),
            tls=str(folder),
        )
        orders = {"layer by layer": None, "micro-batch after micro-batch": 0}
        exposed: dict[str, float] = {}
        figures: dict[str, float] = {}
        for order, tokens in orders.items():
            steps = run_order(network, spec, tokens)
            for key in ("exchange_exposed_ms", "exchange_ms", "seconds"):
                figures[f"{order}, {key}"] = round(statistics.median(s[key] for s in steps), 3)
            exposed[order] = figures[f"{order}, exchange_exposed_ms"]
        first, second = orders
        name = f"{options.rate} Mbit/s, {options.micro_batches} micro-batches, exposed exchange"
        ratio = Ratio(f"{name} {first}", exposed[first] / exposed[second], second, target=TARGET)
        report.add(ratio, **figures)
    return report.write()


def run_order(
    network: ShapedNetwork, spec: MemberSpec, group_tokens: int | None
) -> list[dict[str, float]]:
    """Return the measured steps as the coordinator records them."""
    with LocalCluster(patience=600) as cluster:
        port = cluster.start_coordinator(spec.as_coordinator(), network.inside(0))
        worker = replace(spec.as_worker(0, port), group_tokens=group_tokens)
        cluster.start_worker(worker, network.inside(1))
        steps = [event for _, event in cluster.events() if event["event"] == "step"]
    return steps[WARM_UP:]


if __name__ == "__main__":
    raise SystemExit(main())
