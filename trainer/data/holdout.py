"""A share of a file's samples is held out for validation, the same on every machine.

Which samples these are follows from what they say: not from their order, nor from a seed. So
samples that say the same, whatever their labels, are on one side together.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.data.samples import SampleFile
from trainer.errors import InputError


def hold_out(file: SampleFile, fraction: float) -> tuple[SampleFile, SampleFile]:
    """Return what is left to train on and what is held out, each in the file's order.

    Args:
        fraction: of the different samples, in (0, 1); at least one is held out.

    Raises:
        InputError: there are no two different samples.
    """
    assert 0 < fraction < 1
    digests = [sample.digest() for sample in file.samples]
    different = sorted(set(digests))  # digests are as good as drawn, so their order is random
    if len(different) < 2:
        raise InputError(
            f"{file.path}: has one different sample, so none can be held out; give a validation"
            " file, or data.validation_fraction 0"
        )
    held = set(different[: max(1, round(fraction * len(different)))])
    pairs = list(zip(file.samples, digests, strict=True))
    train = [sample for sample, digest in pairs if digest not in held]
    validation = [sample for sample, digest in pairs if digest in held]
    return replace(file, samples=train), replace(file, samples=validation)
