"""The digests of many samples: which occur again, and which are held out for validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

DIGEST_TYPE = np.dtype("S16")
"""The first bytes of a sample's digest, which tell the samples of a run apart."""
_CHUNK = 1 << 16
"""Digests that are sorted at once."""

Digests = Iterable[NDArray[np.bytes_]]
"""Those of a file in its order, in parts, so that memory does not grow with them."""


def choose_held_out(digests: NDArray[np.bytes_], fraction: float) -> NDArray[np.bool_] | None:
    """Return which samples are held out, the same on every machine; None: all have one text.

    The choice depends only on the samples' texts, not on their order or on a seed. Samples with the
    same text, with any labels, are in the same part.

    Args:
        fraction: of the different samples, in (0, 1); at least one is held out.
    """
    assert 0 < fraction < 1
    different, same = np.unique(digests, return_inverse=True)
    if len(different) < 2:
        return None
    # Digests are random, so is their order.
    return same < max(1, round(fraction * len(different)))


def count_repeated(digests: NDArray[np.bytes_], labels: NDArray[np.integer]) -> tuple[int, int]:
    """Return how many samples are as one before, and how many texts have several labels.

    Args:
        labels: the class of each sample, -1 without one.
    """
    _, same = np.unique(digests, return_inverse=True)
    kinds = int(labels.max(initial=-1)) + 2
    labelled = np.unique(same.astype(np.int64) * kinds + labels + 1)
    _, variants = np.unique(labelled // kinds, return_counts=True)
    return len(digests) - len(labelled), int((variants > 1).sum())


def count_shared(train: Callable[[], Digests], validation: Digests) -> int:
    """Return how many validation samples have a text that train has, too."""
    shared = 0
    for part in _join(validation):
        different, counts = np.unique(part, return_counts=True)
        found = np.zeros(len(different), np.bool_)
        for other in train():
            places = np.searchsorted(different, other)
            places[places == len(different)] = 0
            found[places[different[places] == other]] = True
        shared += int(counts[found].sum())
    return shared


def _join(digests: Digests) -> Iterator[NDArray[np.bytes_]]:
    """Yield digests in larger parts."""
    held: list[NDArray[np.bytes_]] = []
    for part in digests:
        held.append(part)
        if sum(map(len, held)) >= _CHUNK:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)
