"""Samples and models, as for replicas."""

from tests.trainer.replica.conftest import make_batch
from tests.trainer.replica.torch.parallel.conftest import drawn_model

__all__ = ["drawn_model", "make_batch"]
