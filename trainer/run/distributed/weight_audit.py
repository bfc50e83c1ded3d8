"""The proof that ranks which hold the same part of the weights hold the same bits (F-DP-001).

Under DDP all hold everything; under other strategies, those that are copies of each other. The
collectives that sum gradients would not notice a rank that differs: it would train on, and the
mean of all gradients would be of no model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from trainer.replica.torch.parallel import flat_vector
from trainer.run.distributed.rank_file import locate_part
from trainer.system.errors import RefusedError

_SIZE = blake3.digest_size


class WeightAudit:
    """Compares digests over all ranks; every rank calls `compare_digests` at the same steps.

    Args:
        parameters: this rank's parts of the trainable weights, by layout names.
        ranks: what to call each of them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Sequence[str]) -> None:
        self._parameters, self._ranks = parameters, ranks
        parts = {name: locate_part(part)[:2] for name, part in parameters.items()}
        self._place = blake3(json.dumps(parts, sort_keys=True).encode()).digest()
        self._copied = True
        # Kept, as gloo's threads let go of what they were given after the collective has ended.
        self._mine = torch.empty(2 * _SIZE, dtype=torch.uint8)
        self._found = [torch.empty_like(self._mine) for _ in ranks]

    def compare_digests(self, step: int) -> str | None:
        """Return the hex digest of rank 0's part after `step` updates, which all copies share.

        None if no two ranks hold the same part: then there is nothing to compare.

        Raises:
            RefusedError: on every rank; names those that differ from most copies of their part.
        """
        if not self._copied:
            return None
        self._mine.copy_(torch.tensor(list(self._place + self._local_digest())))
        dist.all_gather(self._found, self._mine)
        found = [bytes(each.tolist()) for each in self._found]
        self._copied = len({proof[:_SIZE] for proof in found}) < len(found)
        if wrong := find_differing(found):
            names = ", ".join(self._ranks[rank] for rank in wrong)
            raise RefusedError(
                f"step {step}: {names}: weights differ from those of the other ranks: the run"
                " is halted and nothing was saved since the last proof; check that machine's memory"
                " and GPU, then start the run again: it resumes from its newest checkpoint"
            )
        return found[0][_SIZE:].hex() if self._copied else None

    def _local_digest(self) -> bytes:
        hasher = blake3()
        for name in sorted(self._parameters):
            part = flat_vector.local_part(self._parameters[name]).detach().cpu().contiguous()
            hasher.update(part.view(-1).view(torch.uint8).numpy().data)
        return hasher.digest()


def find_differing(proofs: Sequence[bytes]) -> list[int]:
    """Return the ranks whose weights are not those of most copies of their part.

    Of two states with equally many copies, that of the lowest rank counts as right.

    Args:
        proofs: by rank, the digest of which part it holds and then that of its weights.
    """
    places = {proof[:_SIZE] for proof in proofs}
    right: set[bytes] = set()
    for part in places:
        copies = Counter(proof for proof in proofs if proof.startswith(part))
        right.add(copies.most_common(1)[0][0])  # of equal counts the first one seen
    return [rank for rank, proof in enumerate(proofs) if proof not in right]
