"""The messages between a replica group's leader and a member, over a connection of their own.

A message is a JSON object, and arrays in the safetensors format; nothing is unpickled. Tensors that
all processes of the group compute with go over the torch process group instead; this connection is
what still works when a collective hangs.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

from trainer.data.soft_targets import SoftTargets
from trainer.data.tokens import Encoded

_LENGTHS = struct.Struct("<QQ")
"""Bytes of JSON and of arrays, before both."""
_SOFT = ("offsets", "ids", "weights", "rest", "entropy")

Arrays = Mapping[str, np.ndarray]


class GroupMessage(NamedTuple):
    """A message of one side."""

    body: dict[str, Any]
    arrays: dict[str, np.ndarray]


class GroupLink:
    """One end; any thread may send, and one receives."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._bytes = bytearray()
        """Bytes of a message that have arrived."""
        self._whole = deque[GroupMessage]()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end; the other one receives None."""
        self._end.close()

    def send(self, body: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        text, data = json.dumps(body).encode(), save(dict(arrays)) if arrays else b""
        with self._sending:
            for part in (_LENGTHS.pack(len(text), len(data)) + text, data):
                left = memoryview(part)
                while left:
                    left = left[os.write(self._end.fileno(), left) :]

    def receive(self) -> GroupMessage | None:
        """Wait for a message; None if the other end is closed."""
        while not self._whole:
            if not self._read_available():
                return None
        return self._whole.popleft()

    def receive_available(self) -> list[GroupMessage] | None:
        """Return the messages that are whole by now, once the link is ready to be read.

        It does not wait for the rest of one, whose sender may be stopped in the middle. None if the
        other end is closed.
        """
        if not self._read_available():
            return None
        whole = list(self._whole)
        self._whole.clear()
        return whole

    def _read_available(self) -> bool:
        """Take what arrives next; False if the other end is closed."""
        try:
            arrived = os.read(self._end.fileno(), 1 << 16)
        except OSError:
            return False
        self._bytes += arrived
        while len(self._bytes) >= _LENGTHS.size:
            text, data = _LENGTHS.unpack_from(self._bytes)
            middle, end = _LENGTHS.size + text, _LENGTHS.size + text + data
            if len(self._bytes) < end:
                break
            body = json.loads(self._bytes[_LENGTHS.size : middle])
            arrays = load(bytes(self._bytes[middle:end])) if data else {}
            self._whole.append(GroupMessage(body, arrays))
            del self._bytes[:end]
        return bool(arrived)


def pack_samples(batch: Sequence[Encoded]) -> dict[str, np.ndarray]:
    """Return samples as arrays that `unpack_samples` reads back equal."""
    arrays: dict[str, np.ndarray] = {}
    for number, sample in enumerate(batch):
        arrays[f"{number}.ids"] = sample.input_ids
        arrays[f"{number}.labels"] = np.asarray(sample.labels, dtype=np.int32)
        if (soft := sample.soft) is not None:
            arrays |= {f"{number}.soft.{part}": getattr(soft, part) for part in _SOFT}
            arrays[f"{number}.soft.temperature"] = np.asarray(soft.temperature, dtype=np.float64)
    return {name: np.array(array, order="C") for name, array in arrays.items()}


def unpack_samples(arrays: Arrays) -> list[Encoded]:
    """Return the samples in their order."""
    count = sum(name.endswith(".ids") and name.count(".") == 1 for name in arrays)
    return [_unpack_sample(arrays, str(number)) for number in range(count)]


def _unpack_sample(arrays: Arrays, number: str) -> Encoded:
    labels, soft = arrays[f"{number}.labels"], None
    if f"{number}.soft.temperature" in arrays:
        parts = [arrays[f"{number}.soft.{part}"] for part in _SOFT]
        soft = SoftTargets(*parts, temperature=float(arrays[f"{number}.soft.temperature"]))
    return Encoded(arrays[f"{number}.ids"], labels if labels.ndim else int(labels), soft)
