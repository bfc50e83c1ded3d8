"""Hold out a share of a file's samples for validation, the same on every machine.

The choice depends only on the samples' texts, not on their order or on a seed. Samples with the
same text, with any labels, are in the same part.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.data.samples import SampleFile
from trainer.system.errors import InputError


def hold_out(file: SampleFile, fraction: float) -> tuple[SampleFile, SampleFile]:
    """Return the training samples and the held-out ones, each in the file's order.

    Args:
        fraction: of the different samples, in (0, 1); at least one is held out.

    Raises:
        InputError: there are no two different samples.
    """
    assert 0 < fraction < 1
    digests = [sample.digest() for sample in file.samples]
    different = sorted(set(digests))  # digests are random, so is their order
    if len(different) < 2:
        raise InputError(
            f"{file.path}: has only one distinct sample, so none can be held out; give a validation"
            " file, or data.validation_fraction 0"
        )
    held = set(different[: max(1, round(fraction * len(different)))])
    pairs = list(zip(file.samples, digests, strict=True))
    train = [sample for sample, digest in pairs if digest not in held]
    validation = [sample for sample, digest in pairs if digest in held]
    return replace(file, samples=train), replace(file, samples=validation, unused=[])
