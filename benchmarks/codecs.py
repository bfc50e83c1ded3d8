"""The codecs of gradients: nanoseconds an element, bytes an element, and against a memcpy.

Error feedback is measured of the codecs that have it in a run.

    python benchmarks/codecs.py [--elements 5898240] [--repeats 15]

One thread. Rounds of all codecs and of the copy are interleaved, so that other load affects all
alike; a figure is the least processor time of its rounds, since what others do only adds. The
elements are normally distributed. Writes benchmarks/results/codecs.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy

import numpy as np
from rig.report import Ratio, Report

from trainer.config.codec import CODECS
from trainer.exchange.policies.feedback import ErrorFeedback
from trainer.exchange.protocol.codecs import make_codec

ENCODE, DECODE = 8.0, 3.0
"""Nanoseconds an element that are still good."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=5_898_240)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--result", default="codecs")
    options = parser.parse_args()
    report = Report(options.result)
    values = np.random.default_rng(0).standard_normal(options.elements, dtype=np.float32)
    out, copy = np.empty_like(values), np.empty_like(values)
    tasks: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(copy, values)}
    codecs = {name: make_codec(name) for name in CODECS}
    for name, codec in codecs.items():
        encoded = codec.encode(values)
        tasks[f"{name} encode"] = lambda codec=codec: codec.encode(values)
        tasks[f"{name} decode"] = lambda codec=codec, encoded=encoded: codec.decode(encoded, out)
        if CODECS[name].needs_feedback:  # which it has in rounds
            feedback = ErrorFeedback(codec, [values.size])
            tasks[f"{name} feedback"] = lambda feedback=feedback: feedback.encode(0, values)
    least = {name: float("inf") for name in tasks}
    for _ in range(options.repeats):
        for name, task in tasks.items():
            begin = time.process_time()
            task()
            least[name] = min(least[name], 1e9 * (time.process_time() - begin) / values.size)

    for name, codec in codecs.items():
        for way, target in (("encode", ENCODE), ("decode", DECODE)):
            found = least[f"{name} {way}"]
            report.add(
                Ratio(f"{name} {way}", found, "a nanosecond an element", target),
                nanoseconds_an_element=found,
                of_memcpy=found / least["memcpy"],
                bytes_an_element=codec.encoded_size(values.size) / values.size,
            )
        if found := least.get(f"{name} feedback"):
            report.add(
                Ratio(f"{name} encode with error feedback", found, "a nanosecond"),
                of_memcpy=found / least["memcpy"],
            )
    report.add(Ratio("memcpy", least["memcpy"], "a nanosecond an element"))
    return report.write()


if __name__ == "__main__":
    sys.exit(main())
